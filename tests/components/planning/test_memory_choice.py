"""Choices of recomputation, offloading and memory for optimizer state, against an exhaustive search."""

from functools import cache, partial
from itertools import product

import attrs
import numpy as np
import pytest

from drawloom.components.pipeline.program.timing import CostTable
from drawloom.components.pipeline.simulation.simulator import simulate
from drawloom.components.planning.memory_choice import MemoryChoiceSearch, RankBytes, StatePlacement
from drawloom.components.planning.stage_costs import PassCost, StageCosts
from drawloom.components.planning.timeline import compute_peak_host_bytes, compute_peak_memory
from drawloom.components.ports.features import MemoryChoice
from drawloom.components.ports.program import OPS, Program
from drawloom.components.ports.stages import Recompute
from support.schedules import schedule

KEPT: dict[Recompute, tuple[int, float]] = {"none": (100, 0.0), "selective": (70, 0.1), "blocks": (10, 1.0)}
"""Bytes kept and seconds repeated by policy."""

PLACEMENTS = [StatePlacement(part, int(200 * part), int(220 * part), 0.1 + 3 * part) for part in (0.0, 0.5, 1.0)]

PROGRAM = schedule("gpipe").program(2, 4)


def stage_costs(policy: Recompute, stage: int) -> StageCosts:
    """Return the costs of a stage; the second is twice as large."""
    kept, again = KEPT[policy]
    forward = PassCost(1.0, peak_delta=(1 + stage) * kept, kept_bytes={"x": (1 + stage) * kept})
    return StageCosts({"F": forward, "B": PassCost(2.0 + again, peak_delta=5)}, 0)


def link_table(link: float, costs: dict[int, StageCosts]) -> CostTable:
    """Return the costs of the stages, with a link of this bandwidth."""
    lengths = np.array([[costs[s].passes[op].seconds if op in "FB" else 0.0 for op in OPS] for s in costs])
    kept = np.array([costs[s].passes["F"].total_kept_bytes / link for s in costs])
    return CostTable(lengths=lengths, offload_by_stage=kept)


def count_bytes(rank: int, program: Program, costs: dict[int, StageCosts]) -> RankBytes:
    """Return the bytes of a rank with its state on the device."""
    device = 200 + compute_peak_memory(program, rank, costs, dict.fromkeys(costs, 0)).bytes
    return RankBytes(device, compute_peak_host_bytes(program, rank, costs))


def search(
    link: float, limit: int, host_limit: int = 0, may_offload_activations: bool = True, placements: int = 1
) -> MemoryChoiceSearch:
    """Return the search for two stages on two ranks, with a link of this bandwidth."""
    return MemoryChoiceSearch(
        program=PROGRAM,
        costs={policy: {stage: stage_costs(policy, stage) for stage in range(2)} for policy in KEPT},
        build_table=partial(link_table, link),
        count_bytes=count_bytes,  # type: ignore[arg-type]
        placements=[PLACEMENTS[:placements]] * 2,
        limit=200 + limit,
        host_limit=host_limit,
        may_offload_activations=may_offload_activations,
    )


@cache
def pass_costs(
    link: float, recompute: tuple[Recompute, ...], offloaded: frozenset[int]
) -> tuple[float, list[RankBytes]]:
    """Return the sum of the ranks' seconds alone and every rank's bytes, with all state on the devices."""
    costs = {stage: stage_costs(policy, stage) for stage, policy in enumerate(recompute)}
    program = attrs.evolve(PROGRAM, offloaded=offloaded)
    alone = [program.select_actions(program.rank_by_action == rank) for rank in range(2)]
    seconds = sum(simulate(attrs.evolve(part, offloaded=offloaded), link_table(link, costs)).makespan for part in alone)
    return seconds, [count_bytes(rank, program, costs) for rank in range(2)]


def evaluate(link: float, policies: MemoryChoiceSearch, choice: MemoryChoice) -> tuple[float, bool]:
    """Return the sum of the ranks' seconds alone, and whether every rank fits."""
    seconds, needed = pass_costs(link, choice.recompute, choice.offloaded)
    placed = [item for part in choice.host_states for item in PLACEMENTS if item.host_fraction == part]
    host = policies.host_limit or float("inf")
    fits = all(
        size.device - state.saved <= policies.limit and size.host + state.host <= host
        for size, state in zip(needed, placed, strict=True)
    )
    return seconds + sum(state.seconds for state in placed), fits


@pytest.mark.parametrize("link", [1e9, 60.0, 20.0])
@pytest.mark.parametrize("limit", [10_000, 700, 450, 300, 100])
@pytest.mark.parametrize("host_limit", [0, 150])
def test_the_choice_is_the_fastest_that_fits(link: float, limit: int, host_limit: int) -> None:
    """No other choice for the stages fits and is faster, with the state on the device or partly on the host."""
    for placements in (1, 3):
        policies = search(link, limit, host_limit, placements=placements)
        fractions = [item.host_fraction for item in PLACEMENTS[:placements]]
        every = [
            evaluate(link, policies, MemoryChoice(recompute, frozenset(offloaded), states))
            for recompute in product(KEPT, repeat=2)
            for offloaded in ((), (0,), (1,), (0, 1))
            for states in product(fractions, repeat=2)
        ]
        fitting = [seconds for seconds, fits in every if fits]
        seconds, fits = evaluate(link, policies, policies.choose())
        assert fits == bool(fitting)
        assert not fitting or seconds == pytest.approx(min(fitting))


def test_links_decide_between_offloading_and_recomputing() -> None:
    """A fast link offloads, a slow one recomputes, and memory to spare keeps everything."""
    kept: tuple[Recompute, ...] = ("none", "none")
    nothing = (0.0, 0.0)
    assert search(1e9, 10_000).choose() == MemoryChoice(kept, frozenset(), nothing)
    assert search(1e9, 700).choose() == MemoryChoice(kept, frozenset({1}), nothing)
    recomputed = MemoryChoice(("none", "selective"), frozenset(), nothing)
    assert search(1.0, 700).choose() == recomputed
    assert search(1e9, 700, may_offload_activations=False).choose() == recomputed
    assert search(1e9, 700, host_limit=10).choose() == recomputed


def test_rank_with_three_stages_recomputes_all_alike() -> None:
    """Stages beyond two have one policy together, also where none may be offloaded."""
    looped = attrs.evolve(
        search(1e9, 2400, may_offload_activations=False),
        program=schedule("looped_bfs", stages_per_rank=3).program(1, 4),
        costs={policy: {stage: stage_costs(policy, stage) for stage in range(3)} for policy in KEPT},
    )
    assert looped.choose() == MemoryChoice(("selective",) * 3, frozenset(), (0.0,))


def test_state_leaves_the_device_as_far_as_needed() -> None:
    """Half of it is enough for the second rank, where more recomputation would take longer than the stream."""
    chosen = search(1.0, 500, placements=3).choose()
    assert chosen == MemoryChoice(("none", "selective"), frozenset(), (0.0, 0.5))
