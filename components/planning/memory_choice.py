"""
Choice among keeping, recomputing, offloading and quantizing activations by stage, and of the optimizer's state in host
memory: the fastest within a rank's memory.

All are chosen together: recomputation shrinks transfers, and the less activations take, the more state stays on the
device. They leave other ranks' memory unchanged, so the choice is made rank by rank, as in
`pipeline/program/recomputation.py`: among all choices within both limits, for device and host, the fastest for the rank
alone. Waits for the link are simulated. Planners that choose recomputation and offloading: Mist (Zhu et al. 2025,
arXiv 2503.19050) and OptPipe (arXiv 2510.05186); a fraction of the state: Deep Optimizer States (Maurya et al. 2024,
arXiv 2410.21316).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import compress
from operator import and_

import attrs
import numpy as np

from drawloom.components.pipeline.program.lowering import pair_offloaded_forward_and_backward
from drawloom.components.pipeline.program.recomputation import ONE_OF, list_stage_choices
from drawloom.components.pipeline.program.timing import CostTable
from drawloom.components.pipeline.simulation.simulator import simulate
from drawloom.components.planning.stage_costs import StageCosts
from drawloom.ports import MemoryChoice, Program, Recompute

POLICIES: tuple[Recompute, ...] = ("none", "selective", "quantized", *sorted(set(ONE_OF) - {1}, reverse=True), "blocks")
"""Recompute policies from the least recomputation to the most."""


def list_policies(may_quantize: bool, compiled: bool) -> list[Recompute]:
    """Return the policies to choose from; `compiled` blocks leave the choice of tensors to torch."""
    by_tensor: dict[Recompute, bool] = {"selective": not compiled, "quantized": may_quantize and not compiled}
    return [policy for policy in POLICIES if by_tensor.get(policy, True)]


HOST_FRACTIONS = tuple(part / 16 for part in range(17))
"""Fractions of the optimizer's state in host memory among which a rank chooses."""

Costs = Mapping[int, StageCosts]


@attrs.frozen
class RankBytes:
    """A rank's peak bytes on the device, and its bytes in host memory."""

    device: int
    host: int


@attrs.frozen
class StatePlacement:
    """
    A rank's optimizer state with this fraction of it in host memory.

    `saved` are the bytes on the device that it takes less than a state on the device, `host` its bytes in host memory,
    and `seconds` the time for an update.
    """

    host_fraction: float
    saved: int
    host: int
    seconds: float


@attrs.frozen
class _RankChoice:
    """A rank's recompute policies by stage, its offloaded stages, and its state's fraction in host memory."""

    policies: Mapping[int, Recompute]
    offloaded: frozenset[int] = frozenset()
    host_fraction: float = 0.0


def _make_unlimited_if_0(limit: int) -> float:
    return limit or math.inf


@attrs.frozen(eq=False)
class MemoryChoiceSearch:
    """
    Search for every stage's policy and every rank's optimizer state, for a program without merged costs.

    `costs` are the stages' costs by recompute policy. `count_bytes` returns a rank's bytes for a program and costs by
    stage, with its state on the device, and `build_table` the seconds. `placements` are the placements of every rank's
    state, the fastest first. A limit 0 means none.
    """

    program: Program
    costs: Mapping[Recompute, Costs]
    build_table: Callable[[Costs], CostTable]
    count_bytes: Callable[[int, Program, Costs], RankBytes]
    placements: Sequence[Sequence[StatePlacement]]
    limit: float = attrs.field(converter=_make_unlimited_if_0)
    host_limit: float = attrs.field(converter=_make_unlimited_if_0)
    may_offload_activations: bool

    def choose(self) -> MemoryChoice:
        """Return the choice; if nothing fits on a rank, it has the choice with the least device memory."""
        chosen = [self._choose_for_rank(rank) for rank in range(self.program.ranks)]
        recompute = {stage: policy for choice in chosen for stage, policy in choice.policies.items()}
        return MemoryChoice(
            tuple(recompute[stage] for stage in range(self.program.stages)),
            frozenset[int]().union(*(choice.offloaded for choice in chosen)),
            tuple(choice.host_fraction for choice in chosen),
        )

    def _choose_for_rank(self, rank: int) -> _RankChoice:
        """Return the fastest fitting choice for a rank, or the smallest."""
        rank_program = self.program.select_actions(self.program.rank_by_action == rank)
        stages = np.unique(rank_program.stage).tolist()
        best = _RankChoice(dict.fromkeys(stages, "none"))  # for a rank without stages
        best_seconds, smallest, update = np.inf, (np.inf, np.inf), self.placements[rank][0].seconds
        for busy, choice, table in sorted(self._iterate_candidates(rank_program, stages), key=lambda item: item[0]):
            if busy + update >= best_seconds:
                break  # waits for the link only add to the busy time
            program = attrs.evolve(self.program, offloaded=choice.offloaded)
            needed = self.count_bytes(rank, program, self._select_costs(choice.policies))
            placement = self._choose_state_placement(rank, needed)
            device = needed.device - placement.saved
            fits = device <= self.limit and needed.host + placement.host <= self.host_limit
            if choice.offloaded:
                busy = simulate(attrs.evolve(rank_program, offloaded=choice.offloaded), table).makespan
            seconds, choice = busy + placement.seconds, attrs.evolve(choice, host_fraction=placement.host_fraction)
            if fits and seconds < best_seconds:
                best, best_seconds = choice, seconds
            elif best_seconds == np.inf and (device, seconds) < smallest:
                best, smallest = choice, (device, seconds)
        return best

    def _choose_state_placement(self, rank: int, needed: RankBytes) -> StatePlacement:
        """Return the fastest placement with which a rank fits, or the smallest for which the host has room."""
        placements = self.placements[rank]
        possible = [item for item in placements if needed.host + item.host <= self.host_limit]
        fitting = (item for item in possible if needed.device - item.saved <= self.limit)
        return next(fitting, None) or max(possible or placements[:1], key=lambda item: item.saved)

    def _iterate_candidates(
        self, rank_program: Program, stages: Sequence[int]
    ) -> Iterator[tuple[float, _RankChoice, CostTable]]:
        """Yield a rank's busy seconds and cost table by choice, with its state on the device."""
        actions = [rank_program.action(row) for row in range(len(rank_program.stage))]
        waiting = [
            self.may_offload_activations and bool(pair_offloaded_forward_and_backward(actions, {stage}))
            for stage in stages
        ]
        subsets = {
            frozenset(compress(stages, map(and_, chosen, waiting))): None
            for chosen in list_stage_choices((False, True), len(stages))
        }
        for way in list_stage_choices(self.costs, len(stages)):
            policies = dict(zip(stages, way, strict=True))
            table = self.build_table(self._select_costs(policies))
            busy = float(table.get_durations(rank_program).sum())
            yield from ((busy, _RankChoice(policies, offloaded), table) for offloaded in subsets)

    def _select_costs(self, policies: Mapping[int, Recompute]) -> Costs:
        """Return all stages' costs with these policies; other ranks' stages keep everything."""
        return {
            **next(iter(self.costs.values())),
            **{stage: self.costs[policy][stage] for stage, policy in policies.items()},
        }
