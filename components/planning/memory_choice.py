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

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import attrs
import numpy as np

from drawloom.components.pipeline.program.lowering import pair_offloaded_forward_and_backward
from drawloom.components.pipeline.program.recomputation import MAX_INDEPENDENT_STAGES, ONE_OF
from drawloom.components.pipeline.program.timing import CostTable
from drawloom.components.pipeline.simulation.simulator import simulate
from drawloom.components.planning.stage_costs import StageCosts
from drawloom.components.ports.memory import MemoryChoice
from drawloom.components.ports.program import Program
from drawloom.components.ports.stages import Recompute

POLICIES: tuple[Recompute, ...] = ("none", "selective", "quantized", *sorted(set(ONE_OF) - {1}, reverse=True), "blocks")
"""Recompute policies from the least recomputation to the most."""


def list_policies(may_quantize: bool, compiled: bool) -> list[Recompute]:
    """Return the policies to choose from; `compiled` blocks leave the choice of tensors to torch."""
    by_tensor: dict[Recompute, bool] = {"selective": not compiled, "quantized": may_quantize and not compiled}
    return [policy for policy in POLICIES if by_tensor.get(policy, True)]


HOST_FRACTIONS = tuple(part / 16 for part in range(17))
"""Fractions of the optimizer's state in host memory among which a rank chooses."""

Costs = Mapping[int, StageCosts]


class _Candidate(NamedTuple):
    """A rank's choice: its busy seconds, offloaded stages, recompute policies by stage, and cost table."""

    busy_seconds: float
    offloaded: frozenset[int]
    policies: Mapping[int, Recompute]
    cost_table: CostTable


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
    offloaded: frozenset[int]
    host_fraction: float


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
    limit: int
    host_limit: int
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
        best = _RankChoice(dict.fromkeys(stages, "none"), frozenset(), 0.0)  # for a rank without stages
        best_seconds, smallest, update = np.inf, (np.inf, np.inf), self.placements[rank][0].seconds
        for busy, offloaded, policies, table in sorted(
            self._iterate_candidates(rank_program, stages), key=lambda item: item.busy_seconds
        ):
            if busy + update >= best_seconds:
                break  # waits for the link only add to the busy time
            program = attrs.evolve(self.program, offloaded=offloaded)
            needed = self.count_bytes(rank, program, self._select_costs(policies))
            placement = self._choose_state_placement(rank, needed)
            device = needed.device - placement.saved
            fits = _is_within_or_unlimited(device, self.limit) and _is_within_or_unlimited(
                needed.host + placement.host, self.host_limit
            )
            passes = simulate(attrs.evolve(rank_program, offloaded=offloaded), table).makespan if offloaded else busy
            seconds, choice = passes + placement.seconds, _RankChoice(policies, offloaded, placement.host_fraction)
            if fits and seconds < best_seconds:
                best, best_seconds = choice, seconds
            elif best_seconds == np.inf and (device, seconds) < smallest:
                best, smallest = choice, (device, seconds)
        return best

    def _choose_state_placement(self, rank: int, needed: RankBytes) -> StatePlacement:
        """Return the fastest placement with which a rank fits, or the smallest for which the host has room."""
        placements = self.placements[rank]
        possible = [item for item in placements if _is_within_or_unlimited(needed.host + item.host, self.host_limit)]
        fitting = (item for item in possible if _is_within_or_unlimited(needed.device - item.saved, self.limit))
        return next(fitting, None) or max(possible or placements[:1], key=lambda item: item.saved)

    def _iterate_candidates(self, rank_program: Program, stages: Sequence[int]) -> Iterator[_Candidate]:
        """Yield a rank's choices."""
        actions = [rank_program.action(row) for row in range(len(rank_program.stage))]
        waiting = [
            stage
            for stage in stages
            if self.may_offload_activations and pair_offloaded_forward_and_backward(actions, {stage})
        ]
        independent = len(stages) <= MAX_INDEPENDENT_STAGES
        ways = (
            product(self.costs, repeat=len(stages))
            if independent
            else ((policy,) * len(stages) for policy in self.costs)
        )
        subsets = [
            frozenset(stage for stage, is_chosen in zip(waiting, flags, strict=True) if is_chosen)
            for flags in product((False, True), repeat=len(waiting))
            if independent or len({*flags}) == 1
        ]
        for way in ways:
            policies = dict(zip(stages, way, strict=True))
            table = self.build_table(self._select_costs(policies))
            busy = float(table.get_durations(rank_program).sum())
            yield from (_Candidate(busy, offloaded, policies, table) for offloaded in subsets)

    def _select_costs(self, policies: Mapping[int, Recompute]) -> Costs:
        """Return all stages' costs with these policies; other ranks' stages keep everything."""
        return {
            **next(iter(self.costs.values())),
            **{stage: self.costs[policy][stage] for stage, policy in policies.items()},
        }


def _is_within_or_unlimited(size: int, limit: int) -> bool:
    """Return whether a size is within a limit; 0 means none."""
    return not limit or size <= limit
