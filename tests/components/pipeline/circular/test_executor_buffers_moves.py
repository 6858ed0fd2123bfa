"""The moves between stages."""

from drawloom.components.pipeline.circular.executor import Move, list_moves_after_compute, list_moves_during_compute
from drawloom.components.pipeline.circular.timetable import Timetable

TABLES = [
    Timetable(stages, microbatches, repeats, latency)
    for stages in range(1, 5)
    for latency in (1, 2)
    for microbatches in (1, stages, stages + 1, 2 * stages, 3 * stages - 1, 4 * stages)
    for repeats in (1, 2, 3)
]


def test_every_stage_finds_its_input() -> None:
    """
    In a simulation with block counts in place of tensors, items have passed all earlier blocks. Reading a slot twice,
    writing it twice before a read, or reading an empty one is an error.
    """
    for table in TABLES:
        shift: dict[int, tuple[int, int]] = {}
        storage: dict[int, tuple[int, int]] = {}
        before: dict[int, tuple[int, int]] = {}
        for iteration in range(table.iteration_count):
            outputs = {}
            for stage in range(table.stages):
                item = table.find_item(iteration, stage)
                if item is None:
                    continue
                if stage == 0 and item.repeat == 0:
                    value = (item.microbatch, 0)
                elif stage == 0 and table.uses_circ_storage:
                    value = storage.pop(item.microbatch)
                else:
                    value = shift.pop(stage)
                assert value == (item.microbatch, item.repeat * table.stages + stage), table
                outputs[stage] = (item.microbatch, value[1] + 1)
            for moves, values in (
                (list_moves_during_compute(table, iteration), before),
                (list_moves_after_compute(table, iteration), outputs),
            ):
                for move in moves:
                    assert move.buffer == "state_io" or move.microbatch == values[move.source][0], table
                    if move.buffer == "shift":
                        assert move.target not in shift, table
                        shift[move.target] = values[move.source]
                    elif move.buffer == "circ_storage":
                        assert move.microbatch not in storage, table
                        storage[move.microbatch] = values[move.source]
            before = outputs
        assert not shift and not storage, table


def test_moves_go_to_neighbours_alone() -> None:
    """Moves go to a neighbouring stage, in a ring, and at most one into each buffer between any two stages."""
    for table in TABLES:
        for iteration in range(table.iteration_count):
            moves = list_moves_during_compute(table, iteration) + list_moves_after_compute(table, iteration)
            assert all((move.target - move.source) % table.stages in (0, 1, table.stages - 1) for move in moves), table
            kinds = [(move.source, move.target, move.buffer) for move in moves]
            assert len(set(kinds)) == len(kinds), table


def test_moves_of_a_known_iteration() -> None:
    """3 stages, 6 microbatches, 2 repeats: inputs move up, and the first output reenters through circ_storage."""
    table = Timetable(3, 6, 2)
    assert list_moves_during_compute(table, 0) == [Move(1, 0, "state_io", 2, 0), Move(2, 1, "state_io", 4, 0)]
    assert list_moves_during_compute(table, 3) == [Move(1, 0, "state_io", 5, 1), Move(2, 0, "circ_storage", 0)]
    assert list_moves_after_compute(table, 0) == [Move(0, 1, "shift", 0)]
    assert list_moves_after_compute(table, 4) == [Move(0, 1, "shift", 4), Move(1, 2, "shift", 3)]
    assert list_moves_after_compute(Timetable(3, 6, 2, latency=2), 4) == []
