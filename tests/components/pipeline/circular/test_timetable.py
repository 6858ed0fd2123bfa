"""The arithmetic of a circular pipeline."""

import pytest

from drawloom.components.pipeline.circular.timetable import Item, Timetable

RANGES = "stages, microbatches and repeats are at least 1, and latency is 1 or 2"
TABLES = [
    Timetable(stages, rounds * stages, repeats, latency)
    for stages in range(1, 5)
    for latency in (1, 2)
    for rounds in range(latency, 5)
    for repeats in (1, 2, 3)
]


@pytest.mark.parametrize("table", TABLES, ids=repr)
def test_every_block_sees_every_microbatch_once_and_in_order(table: Timetable) -> None:
    """Each stage takes its blocks one after another, and all microbatches in each, as in a looped pipeline."""
    wanted = [Item(microbatch, repeat) for repeat in range(table.repeats) for microbatch in range(table.microbatches)]
    for stage in range(table.stages):
        items = [table.item(iteration, stage) for iteration in range(table.iterations)]
        assert [item for item in items if item is not None] == wanted
        assert items.count(None) == table.latency * (table.stages - 1)


@pytest.mark.parametrize("table", TABLES, ids=repr)
def test_a_stage_lags_by_the_latency(table: Timetable) -> None:
    """Stage s + 1 has in iteration t + latency the item of stage s in t; no iteration is idle at every stage."""
    for iteration in range(table.iterations):
        row = [table.item(iteration, stage) for stage in range(table.stages)]
        assert any(item is not None for item in row)
        if iteration + table.latency < table.iterations:
            assert row[:-1] == [table.item(iteration + table.latency, stage) for stage in range(1, table.stages)]


@pytest.mark.parametrize("table", TABLES, ids=repr)
def test_reentering_outputs_arrive_in_time(table: Timetable) -> None:
    """Stage 0 needs a reentering output when it arrives, or later if circ_storage is used."""
    first = [table.item(iteration, 0) for iteration in range(table.iterations)]
    for iteration in range(table.iterations):
        item = table.reenters(iteration)
        if item is None:
            continue
        needed = first.index(Item(item.microbatch, item.repeat + 1))
        if table.uses_circ_storage:
            assert needed >= iteration + 2  # one to travel, one to be put away
        else:
            assert needed == iteration + table.latency


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
    """4 stages, 8 microbatches, 2 repeats: 19 iterations, 3 of them bubble; with delay 22, of which 6."""
    assert (Timetable(4, 8, 2).iterations, Timetable(4, 8, 2).bubble_fraction) == (19, 3 / 19)
    assert (Timetable(4, 8, 2, latency=2).iterations, Timetable(4, 8, 2, latency=2).bubble_fraction) == (22, 6 / 22)
    assert Timetable(1, 5, 3).bubble_fraction == 0


@pytest.mark.parametrize("table", TABLES, ids=repr)
def test_inputs_and_outputs_pass_through_the_columns(table: Timetable) -> None:
    """
    Carried out with names in place of tensors, stage 0 finds each input and outputs end where they are looked for.

    What `is_wanted` calls unwanted is left out on the way, and nobody misses it.
    """
    stages, columns = table.stages, table.columns
    rows: list[list[object]] = [
        [("in", stage * columns + place) for place in range(columns)] for stage in range(stages)
    ]
    for iteration in range(table.iterations):
        column = iteration % columns
        if iteration < table.microbatches:
            assert rows[0][column] == ("in", iteration)
        for stage in range(1, stages):
            rows[stage - 1][column] = rows[stage][column] if table.moves_up(iteration, stage) else None
        item = table.item(iteration, stages - 1)
        rows[-1][column] = ("out", item.microbatch) if item and table.is_finished(iteration) else None
    found = [rows[stage][table.column(place)] for stage in range(stages) for place in range(columns)]
    assert found == [("out", microbatch) for microbatch in range(table.microbatches)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 6), "6 microbatches can't be divided evenly among 4 stages; write 4 or 8"),
        ((4, 3), "3 microbatches can't be divided evenly among 4 stages; write 4"),
        ((4, 6, 1, 2), "6 microbatches can't be divided evenly among 4 stages; write 8"),
        ((4, 10, 1, 2), "10 microbatches can't be divided evenly among 4 stages; write 8 or 12"),
        (
            (4, 4, 2, 2),
            "4 microbatches are too few for 4 stages and delayed forwarding, in which an output needs two iterations "
            "to the next stage; write 8, or no delay",
        ),
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
def test_numbers_that_do_not_fit_are_refused(arguments: tuple[int, ...], message: str) -> None:
    """Numbers that don't fit together are an error that names numbers to write instead."""
    with pytest.raises(ValueError) as caught:
        Timetable(*arguments)
    assert str(caught.value) == message
