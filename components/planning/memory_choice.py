"""
Choice among keeping, recomputing and offloading activations, by stage: the fastest within a rank's memory.

Recomputation and offloading must be chosen together, because recomputation shrinks transfers too. Both leave other
ranks' memory unchanged, so the choice is made rank by rank, as in `pipeline/program/recomputation.py`: among all
choices within both limits, for device and host, the fastest for the rank alone. Waits for the link
are simulated. Planners that choose both: Mist (Zhu et al. 2025, arXiv 2503.19050) and OptPipe (arXiv 2510.05186).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product

import attrs
import numpy as np

from drawloom.components.pipeline.program.lowering import list_offloaded_passes
from drawloom.components.pipeline.program.recomputation import MAX_INDEPENDENT_STAGES, ONE_OF
from drawloom.components.pipeline.program.timing import CostTable
from drawloom.components.pipeline.simulation.simulator import simulate
from drawloom.components.planning.stage_costs import StageCosts
from drawloom.components.ports.program import Program
from drawloom.components.ports.stages import Recompute

POLICIES: tuple[Recompute, ...] = ("none", "selective", *sorted(set(ONE_OF) - {1}, reverse=True), "blocks")
"""Recompute policies from the least recomputation to the most."""

Costs = Mapping[int, StageCosts]


@attrs.frozen
class RankBytes:
    """A rank's peak bytes on the device, and its bytes in host memory."""

    device: int
    host: int


@attrs.frozen(eq=False)
class StagePolicies:
    """
    Search for every stage's policy, for a program without merged costs.

    `costs` are the stages' costs by recompute policy. `count_bytes` returns a rank's bytes for a program and costs by
    stage, and `build_table` the seconds. A limit 0 means none.
    """

    program: Program
    costs: Mapping[Recompute, Costs]
    build_table: Callable[[Costs], CostTable]
    count_bytes: Callable[[int, Program, Costs], RankBytes]
    limit: int
    host_limit: int
    may_offload: bool

    def choose(self) -> tuple[tuple[Recompute, ...], frozenset[int]]:
        """
        Return the recompute policies by stage, and the offloaded stages.

        If nothing fits on a rank, it has the choice with the least device memory.
        """
        chosen = [self._choose_for_rank(rank) for rank in range(self.program.ranks)]
        recompute = {stage: policy for policies, _ in chosen for stage, policy in policies.items()}
        offloaded = frozenset[int]().union(*(stages for _, stages in chosen))
        return tuple(recompute[stage] for stage in range(self.program.stages)), offloaded

    def _choose_for_rank(self, rank: int) -> tuple[Mapping[int, Recompute], frozenset[int]]:
        """Return the fastest fitting choice for a rank, or the smallest."""
        alone = self.program.select_actions(self.program.rank_by_action == rank)
        stages = np.unique(alone.stage).tolist()
        best: tuple[Mapping[int, Recompute], frozenset[int]] | None = None
        best_seconds, smallest = np.inf, (np.inf, np.inf)
        for busy, offloaded, policies, table in sorted(self._list_choices(alone, stages), key=lambda item: item[0]):
            if busy >= best_seconds:
                break  # waits for the link only add to the busy time
            program = attrs.evolve(self.program, offloaded=offloaded)
            needed = self.count_bytes(rank, program, self._select_costs(policies))
            fits = _is_within(needed.device, self.limit) and _is_within(needed.host, self.host_limit)
            seconds = simulate(attrs.evolve(alone, offloaded=offloaded), table).makespan if offloaded else busy
            if fits and seconds < best_seconds:
                best, best_seconds = (policies, offloaded), seconds
            elif best_seconds == np.inf and (needed.device, seconds) < smallest:
                best, smallest = (policies, offloaded), (needed.device, seconds)
        return best or (dict.fromkeys(stages, "none"), frozenset())  # a rank without stages

    def _list_choices(
        self, alone: Program, stages: Sequence[int]
    ) -> Iterator[tuple[float, frozenset[int], Mapping[int, Recompute], CostTable]]:
        """Yield a rank's choices: busy seconds, offloaded stages, policies by stage, and the cost table."""
        actions = [alone.action(row) for row in range(len(alone.stage))]
        waiting = [stage for stage in stages if self.may_offload and list_offloaded_passes(actions, {stage})]
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
            busy = float(table.get_durations(alone).sum())
            yield from ((busy, offloaded, policies, table) for offloaded in subsets)

    def _select_costs(self, policies: Mapping[int, Recompute]) -> Costs:
        """Return all stages' costs with these policies; other ranks' stages keep everything."""
        return {
            **next(iter(self.costs.values())),
            **{stage: self.costs[policy][stage] for stage, policy in policies.items()},
        }


def _is_within(size: int, limit: int) -> bool:
    """Return whether a size is within a limit; 0 means none."""
    return not limit or size <= limit
