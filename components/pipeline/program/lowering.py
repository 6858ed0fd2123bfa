"""
Sends and receives put into a rank's line.

Everything that happens, work and messages alike, is laid in one order for the whole world: by when it ends on paper. A
message stands right behind the work that made it, and so before the work that needs it, which ends later. Each rank's
line is this order without what concerns others only. Hence nothing can get stuck, even if a send waits until it is
received, and between two ranks messages are received in the order in which they are sent; and a receive stands before
the work during which its message comes, so that it is posted by then.
"""

import attrs
import numpy as np
from numpy.typing import NDArray

from drawloom.components.pipeline.program.costs import Costs
from drawloom.components.pipeline.program.timing import Timing, time
from drawloom.components.ports.program import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    OPS,
    Action,
    Message,
    Program,
    RankProgram,
    joined_up,
)

PAPER = Costs(comm=0.25)
"""What is assumed of work and messages to lay them in order: a message takes a quarter of a forward."""


def lower(program: Program, rank: int, costs: Costs = PAPER) -> RankProgram:
    """One rank's line with its messages. All ranks must be given the same program and costs; raises Stuck."""
    program = with_whole_backwards(program)
    return with_messages(program, time(program, costs), rank)


def with_whole_backwards(program: Program) -> Program:
    """The same program with a B for each I that its own W follows at once, if no other rank waits for what I gives."""
    together = np.zeros(len(program.stage), dtype=bool)
    together[:-1] = (program.op[:-1] == BACKWARD_INPUT) & (program.op[1:] == BACKWARD_WEIGHT)
    for column in (program.stage, program.microbatch, program.rank):
        together[:-1] &= column[:-1] == column[1:]
    together[:-1] &= ~program.overlaps_previous[1:]
    together &= peers(program) == program.rank
    work = np.where(together, BACKWARD, program.op)
    return attrs.evolve(program, op=work).select(~np.roll(together, 1))


def peers(program: Program) -> NDArray[np.int64]:
    """For each action, the rank that its result goes to, which is its own if there is none to pass on."""
    owners, whose = np.array(program.stage_to_rank), program.rank
    goal = program.stage + np.where(program.op == FORWARD, 1, -1)
    passed_on = (program.op != BACKWARD_WEIGHT) & (goal >= 0) & (goal < program.stages)
    return np.where(passed_on, owners[np.where(passed_on, goal, 0)], whose)


def with_messages(program: Program, timing: Timing, rank: int) -> RankProgram:
    """One rank's line with its messages, given when each action of the whole program ends."""
    whose, goals = program.rank, peers(program)
    works, sends, receives = whose == rank, (whose == rank) & (goals != rank), (whose != rank) & (goals == rank)
    rows = np.concatenate([np.flatnonzero(some) for some in (works, sends, receives)])
    kinds = np.repeat([_WORK, _SEND, _RECEIVE], [some.sum() for some in (works, sends, receives)])
    order = np.lexsort((kinds, rows, timing.wave[rows], timing.end[rows]))  # rows break ties alike on all ranks
    rows, kinds = rows[order], kinds[order]
    peer = np.where(kinds == _SEND, goals[rows], whose[rows])
    columns = (program.stage[rows], program.op[rows], program.microbatch[rows], kinds, peer)
    actions = [_action(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
    return joined_up(zip(actions, _joined(program.overlaps_previous[rows], kinds), strict=True))


_WORK, _SEND, _RECEIVE = range(3)

_MESSAGES: dict[tuple[bool, int], tuple[Message, int]] = {
    (True, _SEND): ("SEND_F", 0),
    (True, _RECEIVE): ("RECV_F", 1),
    (False, _SEND): ("SEND_B", 0),
    (False, _RECEIVE): ("RECV_B", -1),
}
"""By whether it comes of a forward and on which side it is: a message's name, and how far from the sending stage."""


def _action(stage: int, work: int, microbatch: int, kind: int, peer: int) -> Action:
    """The work itself, or its result on the way: where it leaves, or where it arrives."""
    if kind == _WORK:
        return Action(stage, OPS[work], microbatch)
    message, step = _MESSAGES[work == FORWARD, kind]
    return Action(stage + step, message, microbatch, peer)


def _joined(joined: NDArray[np.bool_], kinds: NDArray[np.int64]) -> list[bool]:
    """Whether each is joined to the one before: what stands between two parts of an overlap is part of it."""
    found = np.zeros(len(joined), dtype=bool)
    works = np.flatnonzero(kinds == _WORK)
    for work, before in zip(works[1:][joined[works[1:]]], works[:-1][joined[works[1:]]], strict=True):
        found[before + 1 : work + 1] = True
    return found.tolist()
