"""The arithmetic of a circular pipeline."""

import pytest

from drawloom.components.pipeline.circular.timetable import Item, Timetable

RANGES = "stages, microbatches and repeats are at least 1, and latency is 1 or 2"
TABLES = [
    Timetable(stages, microbatches, repeats, latency)
    for stages in range(1, 5)
    for latency in (1, 2)
    for microbatches in (1, stages, stages + 1, 2 * stages, 3 * stages - 1, 4 * stages)
    for repeats in (1, 2, 3)
]


def test_every_block_sees_every_microbatch_once_and_in_order() -> None:
    """Stages take their blocks one after another, and all microbatches in a block, as in a looped pipeline."""
    for table in TABLES:
        wanted = [
            Item(microbatch, repeat) for repeat in range(table.repeats) for microbatch in range(table.microbatches)
        ]
        for stage in range(table.stages):
            items = [table.find_item(iteration, stage) for iteration in range(table.iteration_count)]
            assert [item for item in items if item is not None] == wanted, table
            empty = table.repeats * (table.slot_count - table.microbatches)
            assert items.count(None) == table.latency * (table.stages - 1) + empty, table


def test_a_stage_lags_by_the_latency() -> None:
    """Stage s + 1 has in iteration t + latency the item of stage s in t; no iteration is idle if slots are full."""
    for table in TABLES:
        for iteration in range(table.iteration_count):
            row = [table.find_item(iteration, stage) for stage in range(table.stages)]
            assert any(item is not None for item in row) or table.slot_count > table.microbatches, table
            if iteration + table.latency < table.iteration_count:
                assert row[:-1] == [
                    table.find_item(iteration + table.latency, stage) for stage in range(1, table.stages)
                ]


def test_reentering_outputs_arrive_in_time() -> None:
    """Stage 0 needs a reentering output when it arrives, or later if circ_storage is used."""
    for table in TABLES:
        first = [table.find_item(iteration, 0) for iteration in range(table.iteration_count)]
        for iteration in range(table.iteration_count):
            item = table.find_reentering_item(iteration)
            if item is None:
                continue
            needed = first.index(Item(item.microbatch, item.repeat + 1))
            if table.uses_circ_storage:
                assert needed >= iteration + 2, table  # one to travel, one to be put away
            else:
                assert needed == iteration + table.latency, table


@pytest.mark.parametrize(
    ("table", "uses_circ_storage"),
    [
        (Timetable(4, 4, 2), False),
        (Timetable(4, 8, 2), True),
        (Timetable(4, 8, 2, latency=2), False),
        (Timetable(4, 12, 2, latency=2), True),
        (Timetable(4, 8, 1), False),
    ],
    ids=repr,
)
def test_circ_storage_is_used_for_more_microbatches_than_latency(table: Timetable, uses_circ_storage: bool) -> None:
    """The boundary is between m = latency * p, where outputs are needed as they arrive, and the next multiple."""
    assert table.uses_circ_storage is uses_circ_storage


def test_counts_of_a_known_pipeline() -> None:
    """4 stages, 8 microbatches, 2 repeats: 19 iterations, with delay 22; 5 to 7 microbatches have as many slots."""
    assert (Timetable(4, 8, 2).iteration_count, Timetable(4, 8, 2, latency=2).iteration_count) == (19, 22)
    assert {Timetable(4, microbatches).slot_count for microbatches in (5, 6, 7, 8)} == {8}
    assert [Timetable(4, 6).get_microbatches_stored_on_stage(stage) for stage in range(4)] == [
        range(2),
        range(2, 4),
        range(4, 6),
        range(6, 6),
    ]


def test_inputs_and_outputs_pass_through_the_columns() -> None:
    """With names in place of tensors, stage 0 has all inputs, and outputs end in their columns."""
    for table in TABLES:
        stages, columns = table.stages, table.column_count
        rows: list[list[object]] = [
            [("in", number) if number < table.microbatches else None for number in range(first, first + columns)]
            for first in range(0, table.slot_count, columns)
        ]
        for iteration in range(table.iteration_count):
            column = iteration % columns
            if iteration < table.microbatches:
                assert rows[0][column] == ("in", iteration), table
            for stage in range(1, stages):
                moved = table.find_moved_microbatch(iteration, stage)
                assert moved is None or rows[stage][column] in (("in", moved), ("out", moved)), table
                rows[stage - 1][column] = None if moved is None else rows[stage][column]
            finished = table.find_finished_microbatch(iteration)
            rows[-1][column] = None if finished is None else ("out", finished)
        for stage in range(stages):
            entries = [rows[stage][table.find_state_io_output_column(position)] for position in range(columns)]
            assert [entry for entry in entries if entry is not None] == [
                ("out", number) for number in table.get_microbatches_stored_on_stage(stage)
            ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (0, 1),
            f"{RANGES}: Timetable(stages=0, microbatches=1, repeats=1, latency=1)",
        ),
        (
            (1, 1, 1, 3),
            f"{RANGES}: Timetable(stages=1, microbatches=1, repeats=1, latency=3)",
        ),
    ],
)
def test_impossible_numbers_are_refused(arguments: tuple[int, ...], message: str) -> None:
    """Numbers below 1, and a latency above 2 iterations, are an error naming them."""
    with pytest.raises(ValueError) as caught:
        Timetable(*arguments)
    assert str(caught.value) == message
