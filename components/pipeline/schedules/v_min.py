"""
V-Min: the shortest lifetimes of activations on a V, and so the least memory, a third of 1F1B's.

Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024, section 3. A *building block* assigns a slot
to each of the six ops of a rank for one microbatch; the schedule repeats the block every six slots, without the gaps.
Here every op directly follows the neighbour's op, so that no activation waits:

    rank 0   F0 .  .  .  .  .  .  F1 I1 .  .  .  .  .  .  I0        (p = 4; weight gradients, in
    rank 1   .  F0 .  .  .  .  F1 .  .  I1 .  .  .  .  I0 .          the slots left, are not shown)
    rank 2   .  .  F0 .  .  F1 .  .  .  .  I1 .  .  I0 .  .
    rank 3   .  .  .  F0 F1 .  .  .  .  .  .  I1 I0 .  .  .

If messages take time, a better order is searched within the same memory.
"""

from collections.abc import Collection, Iterable
from typing import ClassVar

import numpy as np

from drawloom import at_least, component, setting
from drawloom.components.pipeline.program.builders import (
    F0,
    F1,
    I0,
    I1,
    W0,
    W1,
    OpCodes,
    OpCodeSchedule,
    assign_stages_in_vee,
)
from drawloom.components.pipeline.program.list_scheduling import (
    SchedulingTask,
    build_list_schedule,
    compute_peak_activations,
)
from drawloom.components.pipeline.program.policy_search import search_best_policy
from drawloom.components.pipeline.program.timing import Costs, compute_timing
from drawloom.ports import Program

PERIOD = 6
"""Slots between two microbatches: a forward pass and both parts of a backward pass, for two stages."""


@component(impact="safe")
class VMin(OpCodeSchedule):
    """V-Min: a third of the memory of 1F1B, with about the same bubble."""

    in_vee: ClassVar[bool] = True

    comm: float = setting("time of a message, relative to the forward pass of a stage", default=0.0, check=at_least(0))

    def build_rank_op_codes(self, rank: int, ranks: int, microbatches: int) -> OpCodes:
        """Return the op codes of one rank, in order, for messages that take no time."""
        # A rank's op codes in the order of their slots, with the block repeated for all microbatches
        slot_by_op = _compute_first_microbatch_slots(rank, ranks)
        slots = np.add.outer(list(slot_by_op.values()), PERIOD * np.arange(microbatches)).ravel()
        op_codes = np.repeat(list(slot_by_op), microbatches)
        row: OpCodes = op_codes[np.argsort(slots)].tolist()
        return row

    def program_for_ranks(self, wanted: Collection[int], ranks: int, microbatches: int) -> Program:
        """Return the program with the wanted ranks' actions; a searched order has all ranks' actions."""
        published = super().program_for_ranks(range(ranks) if self.comm else wanted, ranks, microbatches)
        if not self.comm:
            return published
        sizes, costs = (1.0,) * (2 * ranks), Costs(comm=self.comm)
        task = SchedulingTask(
            assign_stages_in_vee(ranks), microbatches, costs, sizes, max(compute_peak_activations(published, sizes))
        )
        other = build_list_schedule(task, search_best_policy(task))
        return min(published, other, key=lambda program: compute_timing(program, costs).makespan)


def _compute_first_microbatch_slots(rank: int, ranks: int) -> dict[int, int]:
    """Return the first microbatch's slots by op; they are distinct modulo PERIOD, so that blocks don't collide."""
    late = 2 if ranks % PERIOD in (0, 3) else 0  # or F0 and I1 would be 2 p slots apart, a multiple of the period
    block = {
        F0: rank,
        F1: late + 2 * ranks - 1 - rank,
        I1: late + 2 * ranks + rank,
        I0: 2 * late + 4 * ranks - 1 - rank,
    }
    for weight, after in ((W1, block[I1]), (W0, block[I0])):
        block[weight] = _find_free_slot_modulo_period(after, block.values())
    return block


def _find_free_slot_modulo_period(slot: int, used_slots: Iterable[int]) -> int:
    residues = {slot % PERIOD for slot in used_slots}
    return next(later for later in range(slot + 1, slot + PERIOD) if later % PERIOD not in residues)
