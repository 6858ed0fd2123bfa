"""The arithmetic of a circular pipeline."""

import pytest

from drawloom.components.pipeline.circular.timetable import Item, Timetable

TABLES = [
    Timetable(stages, rounds * stages, repeats, hop)
    for stages in range(1, 5)
    for hop in (1, 2)
    for rounds in range(hop, 5)
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
def test_a_stage_lags_behind_the_one_before_by_a_hop(table: Timetable) -> None:
    """Stage s + 1 does in iteration t + hop what stage s did in t; and no iteration is idle at every stage."""
    for iteration in range(table.iterations):
        row = [table.item(iteration, stage) for stage in range(table.stages)]
        assert any(item is not None for item in row)
        if iteration + table.latency < table.iterations:
            assert row[:-1] == [table.item(iteration + table.latency, stage) for stage in range(1, table.stages)]


@pytest.mark.parametrize("table", TABLES, ids=repr)
def test_what_comes_round_is_there_in_time(table: Timetable) -> None:
    """Stage 0 needs an output no sooner than it has come round: at once without storage, after a wait with it."""
    first = [table.item(iteration, 0) for iteration in range(table.iterations)]
    for iteration in range(table.iterations):
        item = table.comes_round(iteration)
        if item is None:
            continue
        needed = first.index(Item(item.microbatch, item.repeat + 1))
        if table.stores:
            assert needed >= iteration + 2  # one to travel, one to be put away
        else:
            assert needed == iteration + table.latency


@pytest.mark.parametrize(
    ("table", "stores"),
    [
        (Timetable(4, 4, 2), False),
        (Timetable(4, 8, 2), True),
        (Timetable(4, 8, 2, latency=2), False),
        (Timetable(4, 12, 2, latency=2), True),
        (Timetable(4, 8, 1), False),
    ],
    ids=repr,
)
def test_storage_is_needed_where_microbatches_outnumber_the_way_round(table: Timetable, stores: bool) -> None:
    """The boundary lies between m = hop * p, where outputs are needed as they come, and the next multiple."""
    assert table.stores is stores


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
            rows[stage - 1][column] = rows[stage][column] if table.is_wanted(iteration, stage) else None
        item = table.item(iteration, stages - 1)
        rows[-1][column] = ("out", item.microbatch) if item and table.is_finished(iteration) else None
    found = [rows[stage][table.column(place)] for stage in range(stages) for place in range(columns)]
    assert found == [("out", microbatch) for microbatch in range(table.microbatches)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 6), "6 microbatches can't be dealt out to 4 stages; write 4 or 8"),
        ((4, 3), "3 microbatches can't be dealt out to 4 stages; write 4"),
        ((4, 6, 1, 2), "6 microbatches can't be dealt out to 4 stages; write 8"),
        ((4, 10, 1, 2), "10 microbatches can't be dealt out to 4 stages; write 8 or 12"),
        (
            (4, 4, 2, 2),
            "4 microbatches are too few for 4 stages and delayed forwarding, in which an output needs two iterations "
            "to the next stage; write 8, or no delay",
        ),
        ((0, 1), "there is no such pipeline: Timetable(stages=0, microbatches=1, repeats=1, latency=1)"),
        ((1, 1, 1, 3), "there is no such pipeline: Timetable(stages=1, microbatches=1, repeats=1, latency=3)"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(arguments: tuple[int, ...], message: str) -> None:
    """Where a pipeline would give wrong numbers in silence, the text says which numbers to write instead."""
    with pytest.raises(ValueError) as caught:
        Timetable(*arguments)
    assert str(caught.value) == message
