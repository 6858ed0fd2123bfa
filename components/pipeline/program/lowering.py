"""
Lowering of a program: sends and receives are inserted into a rank's actions.

All compute actions and messages are put in one global order, by their simulated end. A message follows its producer and
precedes its consumer, an action with a later end. A rank's program is its part of this order. Hence it can't deadlock,
even if a send blocks until it is received. Two ranks exchange messages in sending order, and a receive is posted before
the action during which its message arrives.

An executor's rank derives its order only from its own and its neighbours' actions, in the same time for a thousand
ranks as for three. Between two ranks, messages are still ordered in each direction, as the sender produces them. But
simulated times now differ between ranks, so there is no global order, and sends must not block. They do not, because
every direction between two ranks has its own communicator: a receive only waits for earlier messages in the same
direction.
"""

from collections import defaultdict
from collections.abc import Sequence, Set
from hashlib import sha256

import attrs
import numpy as np
from numpy.typing import NDArray

from drawloom import UserError
from drawloom.components.pipeline.program.timing import Costs, Timing, compute_timing
from drawloom.ports import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    OPS,
    Action,
    Group,
    MessageOp,
    Program,
    RankProgram,
    group_overlaps,
    iterate_actions,
)

ASSUMED_COSTS = Costs(comm=0.25)
"""Costs assumed for the global order: a message takes a quarter of a forward pass."""


def lower_to_rank_program(program: Program, rank: int, costs: Costs = ASSUMED_COSTS) -> RankProgram:
    """
    Return a rank's program with its messages; raise DeadlockError if the program can't finish.

    If all ranks pass the whole program and the same costs, their orders agree with one global order. If a rank passes
    the part returned by `build_program_with_neighbours`, sends must not block.
    """
    program = merge_split_backwards(program)
    return insert_messages(program, compute_timing(program, costs), rank)


def check_ranks_agree_on_program(program: Program, rank: int, group: Group) -> None:
    """Raise UserError unless all ranks in this rank's program have the same actions in their own programs."""
    digests = group.gather_json(_hash_actions(program, rank)) if group.size > 1 else []
    for other, theirs in enumerate(digests):
        here = program.rows(other)
        if here.start < here.stop and _hash_actions(program, other) != theirs:
            raise UserError(
                f"rank {other} of the pipeline has other actions than rank {rank} expects of it: the schedules of the "
                "two ranks differ, in a setting or in their code"
            )


def _hash_actions(program: Program, rank: int) -> str:
    """Return a SHA-256 hash of a rank's actions."""
    rows = program.rows(rank)
    columns = program.stage[rows], program.op[rows], program.microbatch[rows], program.overlaps_previous[rows]
    return sha256(b"".join(column.tobytes() for column in columns)).hexdigest()


def insert_shard_actions(
    rank_program: RankProgram,
    gathered_stages: Set[int],
    reduced_stages: Set[int],
    stages_reduced_by_microbatch: Set[int] = frozenset(),
) -> RankProgram:
    """
    Insert the actions on a rank's sharded stages (FSDP, ZeRO) into its program.

    `gathered_stages` are unsharded one compute action before their first action, to overlap it, and resharded after
    their last action. `reduced_stages` reduce their gradients, and free their parameters, with the last backward pass.
    `stages_reduced_by_microbatch` also add gradients to slices in every earlier backward pass (B or W).
    """
    before: dict[int, list[Action]] = defaultdict(list)
    after: dict[int, list[Action]] = defaultdict(list)
    positioned = _list_computes_with_positions(rank_program)
    computes = sorted({position for position, _ in positioned})
    first = {part.stage: (position, part.microbatch) for position, part in reversed(positioned)}
    last = {part.stage: (position, part) for position, part in positioned}
    for stage, (position, microbatch) in sorted(first.items(), key=lambda pair: pair[1]):
        if stage in gathered_stages:
            early = computes[max(0, computes.index(position) - 1)]
            before[early].append(Action(stage, "UNSHARD", microbatch))
    for position, part in positioned:
        if part.stage in stages_reduced_by_microbatch and part.op in "BW" and last[part.stage] != (position, part):
            before[position].append(Action(part.stage, "REDUCE_SCATTER", part.microbatch))
    for stage, (position, part) in last.items():
        if part.op != "F" and stage in reduced_stages:
            before[position].append(Action(stage, "REDUCE_GRAD", part.microbatch))
        elif stage in gathered_stages:
            after[position].append(Action(stage, "RESHARD", part.microbatch))
    return [
        action for position, item in enumerate(rank_program) for action in (*before[position], item, *after[position])
    ]


def _list_computes_with_positions(rank_program: RankProgram) -> list[tuple[int, Action]]:
    """Return a rank's compute actions, also those in overlaps, with their positions in its program."""
    parts = ((position, part) for position, item in enumerate(rank_program) for part in iterate_actions([item]))
    return [(position, part) for position, part in parts if part.op in OPS]


MIN_GAP = 2
"""Compute actions between a microbatch's forward and backward pass from which on its activations are offloaded."""


def pair_offloaded_forward_and_backward(
    computes: Sequence[Action], offloaded_stages: Set[int]
) -> list[tuple[int, int]]:
    """
    Return pairs (forward, backward), as indices of `computes`, for the passes whose activations are offloaded.

    Activations stay on the device if there are fewer than MIN_GAP actions between the passes.
    """
    forwards = {(part.stage, part.microbatch): index for index, part in enumerate(computes) if part.op == "F"}
    pairs = [
        (forwards[part.stage, part.microbatch], index)
        for index, part in enumerate(computes)
        if part.op in "BI" and part.stage in offloaded_stages
    ]
    return [(start, end) for start, end in pairs if end - start > MIN_GAP]


def insert_offload_actions(rank_program: RankProgram, offloaded_stages: Set[int]) -> RankProgram:
    """
    Insert actions into a rank's program, to offload the activations of `offloaded_stages` to host memory.

    They leave after the forward pass, and return during the compute action before the backward pass; microbatches with
    fewer than `MIN_GAP` compute actions in between stay.
    """
    before: dict[int, list[Action]] = defaultdict(list)
    after: dict[int, list[Action]] = defaultdict(list)
    positioned = _list_computes_with_positions(rank_program)
    for start, end in pair_offloaded_forward_and_backward([part for _, part in positioned], offloaded_stages):
        position, part = positioned[start]
        after[position].append(Action(part.stage, "OFFLOAD", part.microbatch))
        before[positioned[end - 1][0]].append(Action(part.stage, "RELOAD", part.microbatch))
    return [
        action for position, item in enumerate(rank_program) for action in (*before[position], item, *after[position])
    ]


@attrs.frozen
class Sharding:
    """
    Sharding of every stage's parameters over data-parallel ranks.

    Gradients are reduced with a stage's last backward pass, or with every one if `reduces_per_microbatch` is set.
    Weights are gathered once a step if `gathered` is set, or else inside the stage's actions.
    """

    gathered: bool = False
    reduces_per_microbatch: bool = False

    def insert_actions(self, rank_program: RankProgram) -> RankProgram:
        """Return a rank's program with its actions on shards."""
        stages = {action.stage for action in iterate_actions(rank_program)}
        return insert_shard_actions(
            rank_program, stages if self.gathered else set(), stages, stages if self.reduces_per_microbatch else set()
        )


def merge_split_backwards(program: Program) -> Program:
    """Replace every I directly followed by its W by a B, unless another rank consumes I's result."""
    merged = np.zeros(len(program.stage), dtype=bool)
    merged[:-1] = (program.op[:-1] == BACKWARD_INPUT) & (program.op[1:] == BACKWARD_WEIGHT)
    for column in (program.stage, program.microbatch, program.rank_by_action):
        merged[:-1] &= column[:-1] == column[1:]
    merged[:-1] &= ~program.overlaps_previous[1:]
    merged &= find_consumer_ranks(program) == program.rank_by_action
    op = np.where(merged, BACKWARD, program.op)
    return attrs.evolve(program, op=op).select_actions(~np.roll(merged, 1))


def find_consumer_ranks(program: Program) -> NDArray[np.int64]:
    """Return the rank consuming an action's result, by action (actions,); its own rank without a consumer."""
    stage_to_rank, rank_of = np.array(program.stage_to_rank), program.rank_by_action
    dest_stage = program.stage + np.where(program.op == FORWARD, 1, -1)
    has_dest = (program.op != BACKWARD_WEIGHT) & (dest_stage >= 0) & (dest_stage < program.stages)
    return np.where(has_dest, stage_to_rank[np.where(has_dest, dest_stage, 0)], rank_of)


def insert_messages(program: Program, timing: Timing, rank: int) -> RankProgram:
    """Return one rank's program with sends and receives inserted, ordered by the whole program's timing."""
    rank_of, dest_of = program.rank_by_action, find_consumer_ranks(program)
    computes, sends, receives = (
        rank_of == rank,
        (rank_of == rank) & (dest_of != rank),
        (rank_of != rank) & (dest_of == rank),
    )
    rows = np.concatenate([np.flatnonzero(some) for some in (computes, sends, receives)])
    kinds = np.repeat([_COMPUTE, _SEND, _RECEIVE], [some.sum() for some in (computes, sends, receives)])
    order = np.lexsort((kinds, rows, timing.wave[rows], timing.end[rows]))  # rows break ties alike on all ranks
    # Kinds come before the rows in time: at equal times a message follows its producer.
    rows, kinds = rows[order], kinds[order]
    peer = np.where(kinds == _SEND, dest_of[rows], rank_of[rows])
    columns = (program.stage[rows], program.op[rows], program.microbatch[rows], kinds, peer)
    actions = list(map(_create_action, *(column.tolist() for column in columns)))
    return group_overlaps(
        zip(actions, _mark_overlaps_with_previous(program.overlaps_previous[rows], kinds), strict=True)
    )


_COMPUTE, _SEND, _RECEIVE = range(3)

_MESSAGES: dict[tuple[bool, int], tuple[MessageOp, int]] = {
    (True, _SEND): ("SEND_F", 0),
    (True, _RECEIVE): ("RECV_F", 1),
    (False, _SEND): ("SEND_B", 0),
    (False, _RECEIVE): ("RECV_B", -1),
}
"""Op of a message, and its stage relative to the producer's, by whether a forward pass produced it and by side."""


def _create_action(stage: int, op: int, microbatch: int, kind: int, peer: int) -> Action:
    """Return a compute action, or its result's message on the sending or receiving side."""
    if kind == _COMPUTE:
        return Action(stage, OPS[op], microbatch)
    message, step = _MESSAGES[op == FORWARD, kind]
    return Action(stage + step, message, microbatch, peer)


def _mark_overlaps_with_previous(overlaps: NDArray[np.bool_], kinds: NDArray[np.int64]) -> list[bool]:
    """Return whether actions overlap the previous one; messages between an overlap's parts belong to it."""
    is_overlapped = np.zeros(len(overlaps), dtype=bool)
    computes = np.flatnonzero(kinds == _COMPUTE)
    for op, before in zip(computes[1:][overlaps[computes[1:]]], computes[:-1][overlaps[computes[1:]]], strict=True):
        is_overlapped[before + 1 : op + 1] = True
    return is_overlapped.tolist()
