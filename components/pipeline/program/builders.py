"""Builders for programs from op code rows, as in the papers' figures; the order implies microbatch numbers."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from drawloom.ports import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    PartialSchedule,
    Program,
    Schedule,
)


def assign_stages_in_loop(ranks: int, stages_per_rank: int = 1) -> tuple[int, ...]:
    """Return the stages' ranks in a loop: after the last rank, stages continue on the first rank."""
    return tuple(range(ranks)) * stages_per_rank


def assign_stages_in_vee(ranks: int) -> tuple[int, ...]:
    """
    Return the stages' ranks in a V, with two stages per rank.

    The last rank has two consecutive stages, and the first rank has the model's first and last stages.
    """
    return (*range(ranks), *reversed(range(ranks)))


def list_stages_of_rank(rank: int, stage_to_rank: tuple[int, ...]) -> list[int]:
    """Return a rank's stages, in order."""
    return [stage for stage, owner in enumerate(stage_to_rank) if owner == rank]


def index_stages_on_ranks(stage_to_rank: tuple[int, ...]) -> list[int]:
    """Return the position of every stage among its rank's stages, from 0."""
    return [stage_to_rank[:stage].count(rank) for stage, rank in enumerate(stage_to_rank)]


Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

OpCodes = list[int]
"""Op codes of one rank, in order: plain integers, which numpy handles fast for thousands of microbatches."""

_OVERLAP = 1 << 32
"""Added to an op code whose op may run at the same time as the previous one."""


def encode_op(op: int, local_stage: int) -> int:
    """Return the op code for a rank's n-th stage (`local_stage`, from 0); -1 is any stage, for weight gradients."""
    return 4 * local_stage + op + 4


F0, F1 = encode_op(FORWARD, 0), encode_op(FORWARD, 1)
B0, B1 = encode_op(BACKWARD, 0), encode_op(BACKWARD, 1)
I0, I1 = encode_op(BACKWARD_INPUT, 0), encode_op(BACKWARD_INPUT, 1)
W0, W1 = encode_op(BACKWARD_WEIGHT, 0), encode_op(BACKWARD_WEIGHT, 1)
W = encode_op(BACKWARD_WEIGHT, -1)
"""Op code of the oldest pending weight gradients of any stage of the rank."""


def overlap_op_codes(first: int, second: int) -> OpCodes:
    """Return the op codes for an overlap: two ops allowed to run at the same time."""
    return [first, second + _OVERLAP]


def build_program(
    rows: Sequence[OpCodes], stage_to_rank: tuple[int, ...], microbatches: int, *, backward_newest_first: bool = False
) -> Program:
    """
    Return the program with these op code rows, one per rank.

    A stage's n-th forward and n-th backward pass belong to microbatch n; with `backward_newest_first`, backward passes
    run from the last microbatch to the first. Actions for surplus microbatches are dropped.
    """
    stages = np.argsort(np.array(stage_to_rank), kind="stable").reshape(len(rows), -1)
    counted = [_decode_op_codes(np.array(row, dtype=np.int64)) for row in rows]
    local_stage, op, microbatch, overlaps = (np.concatenate(column) for column in zip(*counted, strict=True))
    bounds = np.concatenate([[0], np.cumsum([len(line[0]) for line in counted])])
    stage = stages[np.repeat(np.arange(len(rows)), np.diff(bounds)), local_stage]
    # Microbatches were numbered in the order of op codes, so reversing backward passes only changes numbers.
    if backward_newest_first:
        microbatch[op != FORWARD] = microbatches - 1 - microbatch[op != FORWARD]
    program = Program(
        stage_to_rank, microbatches, bounds, stage=stage, op=op, microbatch=microbatch, overlaps_previous=overlaps
    )
    return program if (microbatch < microbatches).all() else program.select_actions(microbatch < microbatches)


class OpCodeSchedule(ABC):
    """
    Schedule whose ranks build their op codes independently.

    Stages are in a loop, or with `in_vee` in a V. `backward_newest_first` reverses backward passes.
    """

    backward_newest_first: ClassVar[bool] = False
    in_vee: ClassVar[bool] = False
    stages_per_rank: int = 1

    def stage_to_rank(self, ranks: int) -> tuple[int, ...]:
        """Return the stages' ranks."""
        return assign_stages_in_vee(ranks) if self.in_vee else assign_stages_in_loop(ranks, self.stages_per_rank)

    @abstractmethod
    def build_rank_op_codes(self, rank: int, ranks: int, microbatches: int) -> OpCodes:
        """Return one rank's op codes, in order."""

    def program(self, ranks: int, microbatches: int) -> Program:
        """Return all ranks' actions, in order."""
        return self.program_for_ranks(range(ranks), ranks, microbatches)

    def program_for_ranks(self, wanted: Collection[int], ranks: int, microbatches: int) -> Program:
        """Return the program with only the `wanted` ranks' actions."""
        rows = [self.build_rank_op_codes(rank, ranks, microbatches) if rank in wanted else [] for rank in range(ranks)]
        return build_program(
            rows, self.stage_to_rank(ranks), microbatches, backward_newest_first=self.backward_newest_first
        )


class _Actions(NamedTuple):
    """A rank's actions: local stage, op, microbatch, and overlap with the previous action, all (actions,)."""

    local_stage: Ints
    op: Ints
    microbatch: Ints
    overlaps: Bools


def _decode_op_codes(op_codes: Ints) -> _Actions:
    """
    Decode a row's op codes.

    Op codes have no microbatches: a stage's microbatches are in order, and the n-th W belongs to the n-th I.
    """
    overlaps, op_codes = np.divmod(op_codes, _OVERLAP)
    local_stage, op = op_codes // 4 - 1, op_codes % 4
    microbatch = np.zeros_like(local_stage)
    for number in range(local_stage.max(initial=-1) + 1):
        for kind in (op == FORWARD, (op == BACKWARD) | (op == BACKWARD_INPUT)):
            rows = np.flatnonzero(kind & (local_stage == number))
            microbatch[rows] = np.arange(len(rows))
        of_stage = local_stage == number
        _copy_input_grad_microbatches(
            local_stage, microbatch, of_stage & (op == BACKWARD_INPUT), of_stage & (op == BACKWARD_WEIGHT)
        )
    _copy_input_grad_microbatches(local_stage, microbatch, op == BACKWARD_INPUT, local_stage == -1)
    return _Actions(local_stage, op, microbatch, overlaps > 0)


def _copy_input_grad_microbatches(local_stage: Ints, microbatch: Ints, input_grads: Bools, weight_grads: Bools) -> None:
    """Copy stage and microbatch in place, from the n-th input gradients to the n-th weight gradients."""
    produced, consumed = np.flatnonzero(input_grads), np.flatnonzero(weight_grads)
    local_stage[consumed], microbatch[consumed] = (
        local_stage[produced[: len(consumed)]],
        microbatch[produced[: len(consumed)]],
    )


def build_forward_only_program(stage_to_rank: Sequence[int], microbatches: int) -> Program:
    """
    Return a forward-only program; a microbatch is one stage behind the previous microbatch.

    If several stages on a rank are due at the same time, the last stage comes first, so the oldest microbatch finishes
    first.
    """
    passes = [(stage, number) for stage in range(len(stage_to_rank)) for number in range(microbatches)]
    passes.sort(key=lambda pair: (pair[0] + pair[1], -pair[0]))
    lines: list[list[Action]] = [[] for _ in range(max(stage_to_rank) + 1)]
    for stage, number in passes:
        lines[stage_to_rank[stage]].append(Action(stage, "F", number))
    return Program.from_rank_programs(lines, stage_to_rank)


def build_program_with_neighbours(schedule: Schedule, rank: int, ranks: int, microbatches: int) -> Program:
    """
    Return the actions that a rank needs for lowering: its own and its neighbours'.

    Only a PartialSchedule returns less than the whole program.
    """
    if not isinstance(schedule, PartialSchedule):
        return schedule.program(ranks, microbatches)
    hops = pairwise(schedule.stage_to_rank(ranks))
    neighbours = {neighbour for hop in hops if rank in hop for neighbour in hop}
    return schedule.program_for_ranks({rank} | neighbours, ranks, microbatches)


def split_into_rounds(ranks: int, microbatches: int) -> list[int]:
    """Return microbatch counts by round: about as many as ranks, never fewer if possible; larger rounds first."""
    # Fewer, larger rounds than ceil(microbatches / ranks): a round with fewer microbatches than ranks has a bubble.
    count = max(1, microbatches // ranks)
    share, left = divmod(microbatches, count)
    return [share + 1] * left + [share] * (count - left)


def list_op_codes_in_rounds(op: int, sizes: list[int], stages: range) -> OpCodes:
    """Return op codes for all rounds, one after another; a round runs all its microbatches stage by stage."""
    return [encode_op(op, local_stage) for size in sizes for local_stage in stages for _ in range(size)]


def build_interleaved_op_codes(
    rank: int,
    ranks: int,
    stages: int,
    microbatches: int,
    backward_op: int,
    warmup_per_later_rank: int,
    weight_grad_lag: int | None = None,
) -> OpCodes:
    """
    Return a rank's op codes of interleaved 1F1B with `backward_op`, `BACKWARD` or `BACKWARD_INPUT`.

    The k-th rank before the last warms up with `warmup_per_later_rank * k` more forward passes. With `weight_grad_lag`,
    weight gradients are deferred: from backward pass number `weight_grad_lag` on, every one is followed by the oldest
    pending weight gradients.
    """
    sizes = split_into_rounds(ranks, microbatches)
    forwards = list_op_codes_in_rounds(FORWARD, sizes, range(stages))
    backwards = list_op_codes_in_rounds(backward_op, sizes, range(stages)[::-1])
    # The first backward pass needs the first round's forward passes of all local stages, then some per later rank.
    ahead = (stages - 1) * sizes[0] + warmup_per_later_rank * (ranks - 1 - rank)
    row = forwards[:ahead]
    for number, backward in enumerate(backwards):
        row += forwards[ahead + number : ahead + number + 1]
        row.append(backward)
        if weight_grad_lag is not None and number >= weight_grad_lag:
            row.append(W)
    return row if weight_grad_lag is None else row + [W] * min(weight_grad_lag, len(backwards))


def build_breadth_first_op_codes(stages: int, microbatches: int) -> OpCodes:
    """Return every rank's breadth-first op codes: all microbatches through one stage after another, then all back."""
    forwards = list_op_codes_in_rounds(FORWARD, [microbatches], range(stages))
    return forwards + list_op_codes_in_rounds(BACKWARD, [microbatches], range(stages)[::-1])
