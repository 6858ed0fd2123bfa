"""
Every action's start and end, if every rank runs its actions in order, as early as dependencies allow.

This is the longest path through the actions' dependency graph. All ranks advance together, at most one action a wave: a
rank's next action starts when the rank is free and its input has been produced; a rank whose input has not been
produced skips the wave. There are as many waves as the graph is deep, and a wave is a few vectorized operations over
ranks.

Costs by stage and op come from a plan, or from the trace of a run.
"""

from collections.abc import Sequence
from typing import NamedTuple

import attrs
import numpy as np
from numpy.typing import NDArray

from drawloom.ports import BACKWARD_WEIGHT, FORWARD, OPS, Program

Floats = NDArray[np.float64]


DURATIONS = {
    "F": "forward",
    "B": "backward",
    "I": "backward_input",
    "W": "backward_weight",
    "UNSHARD": "unshard",
    "REDUCE_SCATTER": "reduce",
    "REDUCE_GRAD": "reduce",
    "OFFLOAD": "offload",
    "RELOAD": "offload",
}
"""Fields in `Costs` by op; other ops are messages."""


@attrs.frozen
class Costs:
    """
    Durations for a stage's ops on one microbatch, and for a message between ranks (`comm`), in any unit.

    `unshard` is the time to gather a stage's sharded parameters, and `reduce` the time to reduce its gradients.
    `offload` is the time to copy a microbatch's activations to host memory, or back.
    """

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    backward: float = attrs.field()
    comm: float = 0.0
    unshard: float = 0.0
    reduce: float = 0.0
    offload: float = 0.0

    @backward.default
    def _sum_backward(self) -> float:
        return self.backward_input + self.backward_weight

    def get_durations(self, program: Program) -> Floats:
        """Return the durations (actions,) for a program's actions."""
        lengths: Floats = np.array([self.get_duration(op) for op in OPS])[program.op]
        return lengths

    def get_duration(self, op: str, stage: int = 0) -> float:
        """Return an action's duration by op and stage; every message takes `comm`."""
        return float(getattr(self, DURATIONS.get(op, "comm")))

    def select_stages(self, stages: Sequence[int]) -> "Costs":
        """Return the costs for some stages."""
        return self

    def divide_by_stages(self, stages_per_rank: int) -> "Costs":
        """Return costs per stage, given costs per rank; the message size does not change."""
        return attrs.evolve(self, **{name: getattr(self, name) / stages_per_rank for name in DURATIONS.values()})


class DeadlockError(Exception):
    """Error for a deadlock: every rank with actions left waits for another rank."""


@attrs.frozen(eq=False)
class Timing:
    """Start, end and wave by action, all with shape (actions,); an action comes in a later wave than its inputs."""

    start: Floats
    end: Floats
    wave: NDArray[np.int64]

    @property
    def makespan(self) -> float:
        """Return the last action's end."""
        return float(self.end.max(initial=0.0))


def compute_timing(program: Program, costs: Costs) -> Timing:
    """
    Return a program's timing if messages take `costs.comm` and don't share channels.

    Results from ranks without actions are ready from the start: a program reduced to some ranks is timed as if the
    other ranks were never late. Raises DeadlockError if the program can't finish.
    """
    produces, consumes, delay = index_produced_and_consumed_results(program, costs)
    end_of = np.full(max(produces.max(initial=0), consumes.max(initial=0)) + 1, np.inf)
    end_of[_NO_INPUT] = 0.0
    if not np.diff(program.bounds).all():
        end_of[np.setdiff1d(consumes, produces)] = 0.0
    length, next_action, free_at = costs.get_durations(program), program.bounds[:-1].copy(), np.zeros(program.ranks)
    timing = Timing(np.zeros(len(produces)), np.zeros(len(produces)), np.zeros(len(produces), dtype=np.int64))
    wave = 0
    while len(ranks := np.flatnonzero(next_action < program.bounds[1:])):
        ready = end_of[consumes[next_action[ranks]]] + delay[next_action[ranks]]
        # The cell of a result that does not exist yet is infinite.
        can_start = ready < np.inf
        if not can_start.any():
            raise DeadlockError(_describe_deadlock(program, next_action[ranks]))
        ranks = ranks[can_start]
        current = next_action[ranks]
        start = np.maximum(free_at[ranks], ready[can_start])
        end = start + length[current]
        timing.start[current], timing.end[current], timing.wave[current] = start, end, wave
        free_at[ranks] = end_of[produces[current]] = end
        next_action[ranks] += 1
        wave += 1
    return timing


_NO_INPUT = 0
"""Cell of actions without an input, which is ready from the start."""


class ResultIndices(NamedTuple):
    """
    Actions' output cells, input cells, and their inputs' message delays, all (actions,).

    A cell is the time when an activation or gradient is ready. Cell 0 belongs to actions without an input, and the last
    cell to results without a consumer.
    """

    outputs: NDArray[np.int64]
    inputs: NDArray[np.int64]
    delays: Floats


def index_produced_and_consumed_results(program: Program, costs: Costs) -> ResultIndices:
    """Return the cells that a program's actions read and write."""
    stage, op, last = program.stage, program.op, program.stages - 1
    forward, weight = op == FORWARD, op == BACKWARD_WEIGHT
    direction = np.where(forward, 1, -1)
    size = program.stages * program.microbatches
    cell = 1 + stage * program.microbatches + program.microbatch
    # Forward results are in cells 1 to size, backward results in the next `size` cells.
    produces = np.where(forward, cell, np.where(weight, 1 + 2 * size, cell + size))
    consumes = produces - direction * program.microbatches
    # The last stage's backward pass starts from its own forward pass, the loss.
    consumes[~forward & (stage == last)] = cell[~forward & (stage == last)]
    consumes[weight | (forward & (stage == 0))] = _NO_INPUT
    stage_to_rank = np.array(program.stage_to_rank)
    source = np.clip(stage - direction, 0, last)
    delay = np.where(stage_to_rank[source] != stage_to_rank[stage], costs.comm, 0.0)
    delay[consumes == _NO_INPUT] = 0.0
    return ResultIndices(produces, consumes, delay)


def _describe_deadlock(program: Program, actions: NDArray[np.int64]) -> str:
    """Return a message naming the first waiting ranks, and the actions (ranks,) they wait to do."""
    ranks = np.searchsorted(program.bounds, actions, side="right") - 1
    waiting = [
        f"rank {rank} waits to do {program.action(next_action)}"
        for rank, next_action in zip(ranks, actions, strict=True)
    ]
    return "deadlock: " + ", ".join(waiting[:8]) + (", ..." if len(waiting) > 8 else "")


@attrs.frozen(eq=False)
class CostTable(Costs):
    """
    Costs by stage and op: `lengths` (stages, ops), ordered like OPS. `offload_by_stage` (stages,) replaces `offload`.
    """

    lengths: Floats = attrs.field(factory=lambda: np.ones((1, len(OPS))))
    offload_by_stage: Floats = attrs.field(
        default=attrs.Factory(lambda self: np.full(len(self.lengths), self.offload), takes_self=True)
    )

    def get_durations(self, program: Program) -> Floats:
        """Return the durations (actions,) for a program's actions."""
        lengths: Floats = self.lengths[program.stage, program.op]
        return lengths

    def get_duration(self, op: str, stage: int = 0) -> float:
        """Return an action's duration by op and stage."""
        if op in ("OFFLOAD", "RELOAD"):
            return float(self.offload_by_stage[stage])
        return float(self.lengths[stage, OPS.index(op)]) if op in OPS else super().get_duration(op, stage)

    def select_stages(self, stages: Sequence[int]) -> "CostTable":
        """Return the costs for some stages."""
        rows = list(stages)
        return attrs.evolve(self, lengths=self.lengths[rows], offload_by_stage=self.offload_by_stage[rows])

    def resample_to_sizes(self, sizes: Sequence[int]) -> "CostTable":
        """Return the model's costs for other stages with relative `sizes`; costs count as even within an old stage."""
        by_stage = np.column_stack([self.lengths, self.offload_by_stage])
        whole = np.concatenate([np.zeros((1, len(OPS) + 1)), by_stage.cumsum(0)])
        cuts, known = np.cumsum([0, *sizes]) / sum(sizes), np.linspace(0, 1, len(whole))
        columns: Sequence[Floats] = [np.diff(np.interp(cuts, known, sums)) for sums in whole.T]
        return attrs.evolve(self, lengths=np.stack(columns[:-1], axis=1), offload_by_stage=columns[-1])
