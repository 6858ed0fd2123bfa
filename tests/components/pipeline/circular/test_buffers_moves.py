"""What goes from stage to stage."""

import pytest

from drawloom.components.pipeline.circular.buffers import Move, early_moves, late_moves
from drawloom.components.pipeline.circular.timetable import Timetable

TABLES = [
    Timetable(stages, rounds * stages, repeats, hop)
    for stages in range(1, 5)
    for hop in (1, 2)
    for rounds in range(hop, 5)
    for repeats in (1, 2, 3)
]


@pytest.mark.parametrize("table", TABLES, ids=repr)
def test_every_stage_finds_its_input(table: Timetable) -> None:
    """
    Carried out with counts of blocks passed in place of tensors, each item has passed all blocks before its own.

    A place that is read twice, written twice before it is read, or read empty, is an error here.
    """
    shift: dict[int, tuple[int, int]] = {}
    storage: dict[int, tuple[int, int]] = {}
    before: dict[int, tuple[int, int]] = {}
    for iteration in range(table.iterations):
        outputs = {}
        for stage in range(table.stages):
            item = table.item(iteration, stage)
            if item is None:
                continue
            if stage == 0 and item.repeat == 0:
                value = (item.microbatch, 0)
            elif stage == 0 and table.stores:
                value = storage.pop(item.microbatch)
            else:
                value = shift.pop(stage)
            assert value == (item.microbatch, item.repeat * table.stages + stage)
            outputs[stage] = (item.microbatch, value[1] + 1)
        for moves, values in ((early_moves(table, iteration), before), (late_moves(table, iteration), outputs)):
            for move in moves:
                if move.buffer == "shift":
                    assert move.target not in shift
                    shift[move.target] = values[move.source]
                elif move.buffer == "circ_storage":
                    assert move.place == values[move.source][0]
                    assert move.place not in storage
                    storage[move.place] = values[move.source]
        before = outputs
    assert not shift
    assert not storage


@pytest.mark.parametrize("table", TABLES, ids=repr)
def test_nothing_moves_but_to_a_neighbour(table: Timetable) -> None:
    """Moves go to a stage beside, the last one being beside the first, and at most one of a kind between any two."""
    for iteration in range(table.iterations):
        moves = early_moves(table, iteration) + late_moves(table, iteration)
        assert all((move.target - move.source) % table.stages in (0, 1, table.stages - 1) for move in moves)
        kinds = [(move.source, move.target, move.buffer) for move in moves]
        assert len(set(kinds)) == len(kinds)


def test_moves_of_a_known_iteration() -> None:
    """3 stages, 6 microbatches, 2 repeats: inputs come down, the first output comes round and is stored."""
    table = Timetable(3, 6, 2)
    assert early_moves(table, 0) == [Move(1, 0, "state_io", 0), Move(2, 1, "state_io", 0)]
    assert early_moves(table, 3) == [Move(1, 0, "state_io", 1), Move(2, 0, "circ_storage", 0)]
    assert late_moves(table, 0) == [Move(0, 1, "shift")]
    assert late_moves(table, 4) == [Move(0, 1, "shift"), Move(1, 2, "shift")]
    assert late_moves(Timetable(3, 6, 2, latency=2), 4) == []
