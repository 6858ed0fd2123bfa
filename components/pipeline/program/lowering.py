"""
Lowering: sends and receives are inserted into a rank's program.

All compute actions and messages are put in one global order, by their simulated end. A message follows the action that
produces it, and so precedes the action that consumes it, which ends later. A rank's program is the part of this order
that concerns it. Hence it can't deadlock, even if a send blocks until it is received; between two ranks, messages are
received in the order in which they are sent; and a receive precedes the action during which its message arrives, so
that it is posted by then.

A rank of an executor derives its order from its own actions and those of its neighbours alone, which takes as long for
a thousand ranks as for three. Between two ranks messages still have one order in each direction, the sender's, in which
it produces them. As the times are other ones on each rank, that is no global order any more: sends must not block. They
do not, because each direction between two ranks has a communicator of its own, on which a receive waits for nothing but
earlier messages of the same direction.
"""

from collections import defaultdict
from collections.abc import Set
from hashlib import sha256
from itertools import pairwise

import attrs
import numpy as np
from numpy.typing import NDArray

from drawloom.components.pipeline.program.timing import Costs, Timing, time
from drawloom.components.ports.distributed import Group
from drawloom.components.ports.pipeline import PartialSchedule, Schedule
from drawloom.components.ports.program import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    OPS,
    Action,
    MessageOp,
    Program,
    RankProgram,
    flat,
    group_overlaps,
)
from drawloom.graph import UserError

ASSUMED_COSTS = Costs(comm=0.25)
"""Costs assumed for the global order: a message takes a quarter of a forward."""


def lower(program: Program, rank: int, costs: Costs = ASSUMED_COSTS) -> RankProgram:
    """
    One rank's program with its messages; raises Deadlock if the program can't finish.

    If all ranks pass the whole program and the same costs, their orders are parts of one. With `program_for` a rank
    passes what concerns it, and sends must not block.
    """
    program = with_whole_backwards(program)
    return with_messages(program, time(program, costs), rank)


def program_for(schedule: Schedule, rank: int, ranks: int, microbatches: int) -> Program:
    """
    What a rank needs of a program to lower its own part: its actions, and those of ranks that it has messages with.

    Of a schedule that does not know them alone, it is the whole program.
    """
    if not isinstance(schedule, PartialSchedule):
        return schedule.program(ranks, microbatches)
    hops = pairwise(schedule.stage_to_rank(ranks))
    return schedule.program_of({rank, *(each for hop in hops if rank in hop for each in hop)}, ranks, microbatches)


def expect_same(program: Program, rank: int, group: Group) -> None:
    """UserError unless the ranks whose actions this one has in its program have the same ones in theirs."""
    digests = group.gather_json(_digest(program, rank)) if group.size > 1 else []
    for other, theirs in enumerate(digests):
        here = program.rows(other)
        if here.start < here.stop and _digest(program, other) != theirs:
            raise UserError(
                f"rank {other} of the pipeline has other actions than rank {rank} expects of it: the schedules of the "
                "two ranks differ, in a setting or in their code"
            )


def _digest(program: Program, rank: int) -> str:
    rows = program.rows(rank)
    columns = program.stage[rows], program.op[rows], program.microbatch[rows], program.overlaps_previous[rows]
    return sha256(b"".join(column.tobytes() for column in columns)).hexdigest()


def with_shard_actions(
    line: RankProgram, gathered: Set[int], reduced: Set[int], by_microbatch: Set[int] = frozenset()
) -> RankProgram:
    """
    A rank's program with the actions on its sharded stages.

    The `gathered` stages are unsharded one compute action before their first, so that both overlap, and resharded after
    their last; a stage that has a backward and is `reduced` frees its parameters with the reduction. Those reduced
    `by_microbatch` add gradients to slices with each earlier backward (B or W), too.
    """
    before: dict[int, list[Action]] = defaultdict(list)
    after: dict[int, list[Action]] = defaultdict(list)
    places = [(place, part) for place, item in enumerate(line) for part in flat([item]) if part.op in OPS]
    computes = sorted({place for place, _ in places})
    first = {part.stage: (place, part.microbatch) for place, part in reversed(places)}
    last = {part.stage: (place, part) for place, part in places}
    for stage, (place, microbatch) in sorted(first.items(), key=lambda each: each[1]):
        if stage in gathered:
            early = computes[max(0, computes.index(place) - 1)]
            before[early].append(Action(stage, "UNSHARD", microbatch))
    for place, part in places:
        if part.stage in by_microbatch and part.op in "BW" and last[part.stage] != (place, part):
            before[place].append(Action(part.stage, "REDUCE_SCATTER", part.microbatch))
    for stage, (place, part) in last.items():
        if part.op != "F" and stage in reduced:
            before[place].append(Action(stage, "REDUCE_GRAD", part.microbatch))
        elif stage in gathered:
            after[place].append(Action(stage, "RESHARD", part.microbatch))
    return [each for place, item in enumerate(line) for each in (*before[place], item, *after[place])]


@attrs.frozen
class Sharding:
    """
    What ranks do with the parameters of every stage, which data-parallel ranks share.

    Gradients are reduced with the last backward of a stage, and `by_microbatch` with each; weights are `gathered` once
    a step, or else inside of the stage's actions.
    """

    gathered: bool = False
    by_microbatch: bool = False

    def applied(self, line: RankProgram) -> RankProgram:
        """A rank's program with its actions on shards."""
        stages = {action.stage for action in flat(line)}
        return with_shard_actions(
            line, stages if self.gathered else set(), stages, stages if self.by_microbatch else set()
        )


def with_whole_backwards(program: Program) -> Program:
    """The same program with B for each I that its W follows directly, unless another rank consumes the result of I."""
    merged = np.zeros(len(program.stage), dtype=bool)
    merged[:-1] = (program.op[:-1] == BACKWARD_INPUT) & (program.op[1:] == BACKWARD_WEIGHT)
    for column in (program.stage, program.microbatch, program.rank):
        merged[:-1] &= column[:-1] == column[1:]
    merged[:-1] &= ~program.overlaps_previous[1:]
    merged &= dest_ranks(program) == program.rank
    op = np.where(merged, BACKWARD, program.op)
    return attrs.evolve(program, op=op).select(~np.roll(merged, 1))


def dest_ranks(program: Program) -> NDArray[np.int64]:
    """For each action, the rank that consumes its result; its own rank if there is no such rank."""
    stage_to_rank, rank_of = np.array(program.stage_to_rank), program.rank
    dest_stage = program.stage + np.where(program.op == FORWARD, 1, -1)
    has_dest = (program.op != BACKWARD_WEIGHT) & (dest_stage >= 0) & (dest_stage < program.stages)
    return np.where(has_dest, stage_to_rank[np.where(has_dest, dest_stage, 0)], rank_of)


def with_messages(program: Program, timing: Timing, rank: int) -> RankProgram:
    """One rank's program with its messages, ordered by the timing of the whole program."""
    rank_of, dest_of = program.rank, dest_ranks(program)
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
    actions = list(map(_action, *(column.tolist() for column in columns)))
    return group_overlaps(zip(actions, _overlaps_previous(program.overlaps_previous[rows], kinds), strict=True))


_COMPUTE, _SEND, _RECEIVE = range(3)

_MESSAGES: dict[tuple[bool, int], tuple[MessageOp, int]] = {
    (True, _SEND): ("SEND_F", 0),
    (True, _RECEIVE): ("RECV_F", 1),
    (False, _SEND): ("SEND_B", 0),
    (False, _RECEIVE): ("RECV_B", -1),
}
"""By whether a forward produced it and by its side: a message's op, and its stage relative to the producer's."""


def _action(stage: int, op: int, microbatch: int, kind: int, peer: int) -> Action:
    """A compute action, or the message of its result on the sending or the receiving side."""
    if kind == _COMPUTE:
        return Action(stage, OPS[op], microbatch)
    message, step = _MESSAGES[op == FORWARD, kind]
    return Action(stage + step, message, microbatch, peer)


def _overlaps_previous(overlaps: NDArray[np.bool_], kinds: NDArray[np.int64]) -> list[bool]:
    """Whether each action overlaps the previous one: messages between two parts of an overlap belong to it."""
    found = np.zeros(len(overlaps), dtype=bool)
    computes = np.flatnonzero(kinds == _COMPUTE)
    for op, before in zip(computes[1:][overlaps[computes[1:]]], computes[:-1][overlaps[computes[1:]]], strict=True):
        found[before + 1 : op + 1] = True
    return found.tolist()
