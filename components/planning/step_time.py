"""Step time: the pipeline program with every stage's seconds, gradient reduction, and the update."""

import math
from collections.abc import Mapping, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from drawloom.components.pipeline.program.builders import build_forward_only_program
from drawloom.components.pipeline.program.timing import CostTable, compute_timing
from drawloom.components.pipeline.simulation.simulator import simulate
from drawloom.components.planning.stage_costs import StageCosts, Work
from drawloom.ports import OPS, Program

CONTENTION, CONTENTION_OF_COPIES = 0.75, 0.55
"""
Fraction of an exchange's time that passes lose beside it: beside NCCL, fitted to an 8B model's steps with shards on two
H200 (`make bench NAME=several`), and beside copies, which leave the multiprocessors alone. There kernels took 18 ms
less, a fifth of the exchanges' time.
"""


@attrs.frozen
class StepTime:
    """
    Step time by part, in seconds.

    `compute` is the busiest rank's time in forward and backward passes, including `sending`, the collectives inside
    layers; `bubble` is this rank's waiting time, and `offload` the waiting time for activations on the link to host
    memory. `reference` is the time for forward passes of a reference model, if the loss compares with one.
    `gather` is the time for gathering parameters and `sync` for reducing gradients, as far as no pass hides them.
    `update` is the time for changing weights; a host slower than the device uses it to issue the next step's passes,
    and this overlap is subtracted.
    """

    compute: float
    sending: float
    bubble: float
    offload: float
    reference: float
    gather: float
    sync: float
    update: float

    @property
    def seconds(self) -> float:
        """Return the step time in seconds."""
        parts = self.compute, self.bubble, self.offload, self.reference, self.gather, self.sync, self.update
        return sum(parts)


@attrs.frozen
class ReplicaTimes:
    """
    A pipeline rank's work for exchanges with replicas of its stages, and for its update.

    By stage, `gathered_by_pass` is the work for gathering parameters in every pass, and `reduced_by_pass` for reducing
    gradients in every backward pass. `gathered_once` and `reduced_once` are for parameters and gradients exchanged once
    a step, and `update` for changing the weights. `contention` is the fraction of the exchanges' time that passes lose
    beside them.
    """

    gathered_by_pass: Mapping[int, Work]
    reduced_by_pass: Mapping[int, Work]
    gathered_once: Work
    reduced_once: Work
    update: Work
    contention: float = CONTENTION

    def get_exchanges_beside_pass(self, stage: int, op: str) -> Work:
        """Return the work for the exchanges that overlap a stage's pass."""
        gathered = Work() if op == "W" else self.gathered_by_pass.get(stage, Work())
        return gathered + (self.reduced_by_pass.get(stage, Work()) if op in "BW" else Work())


def build_cost_table(
    costs: Mapping[int, StageCosts],
    exchanges: Sequence[ReplicaTimes],
    message_seconds: float,
    host_link_bandwidth: float,
) -> CostTable:
    """
    Return every pass's seconds by stage, given a message's seconds and the host link's bandwidth in bytes per second.

    The host issues passes ahead of the device, so the slower one, over all passes of a microbatch, determines their
    time. A pass takes at least as long as the overlapping gathers and reductions, which also slow it down, and as
    streamed weights on the link.
    """
    lengths = np.zeros((len(costs), len(OPS)))
    for stage, stage_costs in costs.items():
        host_bound = is_host_bound(stage_costs)
        for op, cost in stage_costs.passes.items():
            seconds = [times.get_exchanges_beside_pass(stage, op).planned for times in exchanges]
            lost = sum(times.contention * exchanged for times, exchanged in zip(exchanges, seconds, strict=True))
            own = cost.host if host_bound else cost.seconds
            lengths[stage, OPS.index(op)] = max(own + lost, *seconds, cost.link_seconds)
    kept = np.array([costs[stage].passes["F"].total_kept_bytes for stage in range(len(costs))], dtype=np.float64)
    return CostTable(comm=message_seconds, lengths=lengths, offload_by_stage=kept / host_link_bandwidth)


def is_host_bound(costs: StageCosts) -> bool:
    """Return whether the host takes longer than the device."""
    both = costs.passes["F"], costs.passes["B"]
    return sum(cost.host for cost in both) > sum(cost.seconds for cost in both)


def estimate_step_time(
    program: Program,
    table: CostTable,
    costs: Mapping[int, StageCosts],
    exchanges: Sequence[ReplicaTimes],
    reference: float = 0.0,
) -> StepTime:
    """Return a step's parts for the busiest rank, with `reference` more forward passes per microbatch."""
    lengths, busiest = table.get_durations(program), find_busiest_rank(program, table)
    compute = float(lengths[program.rows(busiest)].sum())
    device, host = (_sum_pass_cost_field(program, costs, busiest, field) for field in ("seconds", "host"))
    makespan = compute_timing(program, table).makespan
    last_backwards = [_get_last_backward_seconds(program, lengths, rank) for rank in range(program.ranks)]
    forwards = build_forward_only_program(program.stage_to_rank, program.microbatches)
    return StepTime(
        compute=compute,
        sending=_sum_pass_cost_field(program, costs, busiest, "comm_seconds"),
        bubble=max(0.0, makespan - compute),
        offload=simulate(program, table).makespan - makespan if program.offloaded else 0.0,
        reference=reference and reference * compute_timing(forwards, table).makespan,
        gather=max(times.gathered_once.planned for times in exchanges),
        sync=max(
            max(times.contention * times.reduced_once.planned, times.reduced_once.planned - last)
            for times, last in zip(exchanges, last_backwards, strict=True)
        ),
        update=max(0.0, max(times.update.planned for times in exchanges) - max(0.0, host - device)),
    )


def find_busiest_rank(program: Program, table: CostTable) -> int:
    """Return the first rank with the longest passes."""
    lengths = table.get_durations(program)
    return max(range(program.ranks), key=lambda rank: float(lengths[program.rows(rank)].sum()))


def _get_last_backward_seconds(program: Program, lengths: NDArray[np.float64], rank: int) -> float:
    """Return the seconds of a rank's last backward pass, overlapped with gradient reduction."""
    rows = program.rows(rank)
    backwards = lengths[rows][program.op[rows] != 0]
    return float(backwards[-1]) if len(backwards) else 0.0


def _sum_pass_cost_field(program: Program, costs: Mapping[int, StageCosts], rank: int, field: str) -> float:
    """Sum a `PassCost` field over a rank's passes."""
    rows = program.rows(rank)
    pairs = zip(program.stage[rows].tolist(), program.op[rows].tolist(), strict=True)
    return math.fsum(getattr(costs[stage].passes[OPS[op]], field) for stage, op in pairs)
