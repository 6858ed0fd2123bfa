"""How slices are joined to stages."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawloom.components.pipeline.program import partition
from drawloom.components.pipeline.program.builders import assign_stages_in_loop, assign_stages_in_vee
from drawloom.components.pipeline.program.list_scheduling import compute_peak_activations
from drawloom.components.pipeline.program.partition import ModelSlices, PartitionSearch, partition_evenly
from drawloom.components.pipeline.program.timing import compute_timing
from support.schedules import schedule

COSTS = st.lists(st.lists(st.floats(0.2, 2), min_size=4, max_size=4), min_size=6, max_size=7)


def slices_of(costs: list[list[float]], activations: list[float] | None = None, comm: float = 0.25) -> ModelSlices:
    """Return model slices with these costs (slices, ops); every stage has additional costs."""
    return ModelSlices(
        np.array(costs), np.array(activations or [1.0] * len(costs)), np.array([0.1, 0.3, 0.2, 0.1]), comm
    )


@given(costs=COSTS, name=st.sampled_from(["one_f_one_b", "zero_bubble_v", "interleaved_1f1b"]))
def test_the_best_of_few_partitions_is_found(costs: list[list[float]], name: str) -> None:
    """It is the fastest of all partitions that fit in memory, timed and counted one by one, if any fits."""
    program, slices = schedule(name).program(2, 4), slices_of(costs)
    limit, makespans = len(costs) * 1.25, []
    for cuts in combinations(range(1, len(costs)), program.stages - 1):
        sizes = tuple(last - first for first, last in pairwise((0, *cuts, len(costs))))
        if max(compute_peak_activations(program, sizes)) <= limit:
            makespans.append(compute_timing(program, slices.compute_cost_table(sizes)).makespan)
    best = PartitionSearch(program, slices, limit).search_best_partition()
    assert best.makespan == pytest.approx(min(makespans, default=float("inf")))
    if makespans:
        assert best.makespan == pytest.approx(compute_timing(program, slices.compute_cost_table(best.sizes)).makespan)
        assert max(compute_peak_activations(program, best.sizes)) <= limit


@pytest.mark.parametrize("name", ["one_f_one_b", "zero_bubble_v"])
def test_where_partitions_are_many_descent_comes_close(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 1 % of the best of all, for a model whose first layers are cheap and whose last one has a head."""
    program = schedule(name).program(3, 9)
    slices = slices_of([[0.5, 1, 0.5, 0.5]] * 3 + [[1.0, 2, 1, 1]] * 8 + [[2.5, 5, 2.5, 2.5]])
    fit = PartitionSearch(program, slices, 1e9)
    best = fit.search_best_partition()
    monkeypatch.setattr(partition, "MAX_EXHAUSTIVE", 0)
    descended = fit.search_best_partition()
    starts = [
        compute_timing(program, slices.compute_cost_table(sizes_at_start)).makespan
        for sizes_at_start in slices.list_starting_partitions(program.stage_to_rank)
    ]
    assert best.makespan <= descended.makespan <= min(1.01 * best.makespan, *starts)


def test_a_search_starts_from_ranks_of_equal_cost() -> None:
    """With a head that costs three layers, its stage has fewer, and in a V its rank has; even ones come first."""
    slices = slices_of([[1.0, 2, 1, 1]] * 15 + [[4.0, 8, 4, 4]])
    assert slices.list_starting_partitions(assign_stages_in_loop(4)) == [(4, 4, 4, 4), (5, 5, 5, 1), (4, 4, 4, 4)]
    first, second, third, last = slices.list_starting_partitions(assign_stages_in_vee(2))[1]
    assert {first + last + 3, second + third} == {9, 10}
    assert partition_evenly(11, 4) == (3, 3, 3, 2)
