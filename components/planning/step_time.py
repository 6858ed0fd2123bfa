"""How long a step takes: the pipeline's program with the seconds of each stage, sums of gradients, and the update."""

import math
from collections.abc import Mapping, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from drawloom.components.pipeline.program.builders import forward_only
from drawloom.components.pipeline.program.timing import CostTable, time
from drawloom.components.planning.stage_costs import StageCosts
from drawloom.components.ports.program import OPS, Program


@attrs.frozen
class StepTime:
    """
    Seconds of a step by part.

    `compute` are those of the busiest rank in forward and backward passes, among them `sending`, in collectives inside
    of layers; `bubble` are those in which it waits. `reference` are those of forward passes without adapters, if the
    loss compares the model with that. `gather` are those of parameters that are gathered and `sync` of gradients that
    are summed, as far as no pass hides them; `update` is all that changes weights, as far as the host, where it is
    slower than the device, does not issue the next step's passes meanwhile.
    """

    compute: float
    sending: float
    bubble: float
    reference: float
    gather: float
    sync: float
    update: float

    @property
    def seconds(self) -> float:
        """Those of a step."""
        return self.compute + self.bubble + self.reference + self.gather + self.sync + self.update

    def as_data(self) -> dict[str, float]:
        """By name, for JSON."""
        return attrs.asdict(self)


@attrs.frozen
class ReplicaTimes:
    """
    What a pipeline rank exchanges with ranks that have the same stages, in seconds.

    By stage, `by_pass` is how long parameters are gathered for each pass, and `summed_by_pass` how long gradients are
    reduced in each backward pass; `once` is for parameters that are gathered once a step, and `reduced` for gradients
    that are summed once. `update` is how long the rank changes its weights.
    """

    by_pass: Mapping[int, float]
    summed_by_pass: Mapping[int, float]
    once: float
    reduced: float
    update: float


def cost_table(costs: Mapping[int, StageCosts], exchanges: Sequence[ReplicaTimes], message: float) -> CostTable:
    """
    The seconds of each pass by stage, if a message takes `message` seconds.

    The host issues passes ahead of the device, so that they take the seconds of whichever needs more for all passes of
    a microbatch. A pass takes at least as long as what it gathers and reduces meanwhile.
    """
    gathers = {stage: seconds for each in exchanges for stage, seconds in each.by_pass.items()}
    reduces = {stage: seconds for each in exchanges for stage, seconds in each.summed_by_pass.items()}
    lengths = np.zeros((len(costs), len(OPS)))
    for stage, each in costs.items():
        by_host = _is_behind(each)
        for op, part in each.passes.items():
            exchanged = (op != "W") * gathers.get(stage, 0.0) + (op in "BW") * reduces.get(stage, 0.0)
            lengths[stage, OPS.index(op)] = max(part.host if by_host else part.seconds, exchanged)
    return CostTable(comm=message, lengths=lengths)


def _is_behind(costs: StageCosts) -> bool:
    """Whether the host needs more seconds than the device."""
    both = costs.passes["F"], costs.passes["B"]
    return sum(each.host for each in both) > sum(each.seconds for each in both)


def step_time(
    program: Program,
    table: CostTable,
    costs: Mapping[int, StageCosts],
    exchanges: Sequence[ReplicaTimes],
    reference: bool = False,
) -> StepTime:
    """The parts of a step, of the rank that ends last; with the passes of a `reference`, if there is one."""
    lengths = table.of(program)
    busy = [float(lengths[program.rows(rank)].sum()) for rank in range(program.ranks)]
    compute = max(busy)
    longest = busy.index(compute)
    device, host = (_sum(program, costs, longest, what) for what in ("seconds", "host"))
    hidden = [_last_backward(program, lengths, rank) for rank in range(program.ranks)]
    return StepTime(
        compute=compute,
        sending=_sum(program, costs, longest, "sending"),
        bubble=max(0.0, time(program, table).makespan - compute),
        reference=_forwards(program, table) if reference else 0.0,
        gather=max(each.once for each in exchanges),
        sync=max(max(0.0, each.reduced - last) for each, last in zip(exchanges, hidden, strict=True)),
        update=max(0.0, max(each.update for each in exchanges) - max(0.0, host - device)),
    )


def _last_backward(program: Program, lengths: NDArray[np.float64], rank: int) -> float:
    """How long the last backward pass of a rank takes, while which gradients are summed."""
    rows = program.rows(rank)
    backwards = lengths[rows][program.op[rows] != 0]
    return float(backwards[-1]) if len(backwards) else 0.0


def _sum(program: Program, costs: Mapping[int, StageCosts], rank: int, what: str) -> float:
    """Of all passes of a rank, one of the numbers of a `Part`."""
    rows = program.rows(rank)
    pairs = zip(program.stage[rows].tolist(), program.op[rows].tolist(), strict=True)
    return math.fsum(getattr(costs[stage].passes[OPS[op]], what) for stage, op in pairs)


def _forwards(program: Program, table: CostTable) -> float:
    """Seconds of a forward pass of each microbatch, without backward passes."""
    return time(forward_only(program.stage_to_rank, program.microbatches), table).makespan
