"""
Simulation of lowered programs whose messages contend for channels.

A rank posts a message when it reaches it, and continues at once. The transfer starts when both sides have posted it and
the channel is free. A compute action waits for the message that it consumes. Events form a dependency graph: each
starts when all its dependencies have ended, and a cycle is a deadlock.

Sharded parameters are gathered, and gradients reduced, while a rank computes, one such action after another. The
stage's first forward waits until it is gathered. Gradients of a B are reduced block by block while it computes them,
so that this can't end earlier; those of a W when it has ended, for it runs none of the hooks that would tell.
"""

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from typing import Literal

import attrs

from drawloom.components.pipeline.program.timing import Costs, DeadlockError
from drawloom.components.ports.program import OPS, Action, RankProgram, flat

Channels = Literal["free", "direction", "pair", "rank", "blocking"]
"""
Which messages share a channel: none (free); those from one rank to another (direction); those between two ranks (pair);
all of a rank (rank). With `blocking` a rank does nothing else while it sends or receives.
"""

REDUCTIONS = ("REDUCE_SCATTER", "REDUCE_GRAD")
SHARD_OPS = ("UNSHARD", *REDUCTIONS)

Name = tuple[int, str, int]
"""Stage, op and microbatch; a message has the name of its send, such as (3, "SEND_F", 7)."""


@attrs.define(eq=False)
class TimedEvent:
    """
    A compute action, a message or an action on shards: its dependencies, its start and its end.

    One that is done `during` another starts and ends no earlier than that.
    """

    name: Name
    length: float
    dependencies: list["TimedEvent"] = attrs.field(factory=list)
    during: "TimedEvent | None" = None
    start: float = 0.0
    end: float = 0.0


Events = dict[Name, TimedEvent]


def run_events(rank_programs: Sequence[RankProgram], costs: Costs, channels: Channels = "free") -> Events:
    """The events of lowered programs of all ranks, with their times; DeadlockError if they never end."""
    events: Events = {}
    for rank_program in rank_programs:
        _add_rank(events, rank_program, costs, channels)
    _time(list(events.values()))
    return events


def _add_rank(events: Events, rank_program: RankProgram, costs: Costs, channels: Channels) -> None:
    """Add one rank's events, each dependent on the last ones that it waits for on this rank."""
    last: dict[Hashable, TimedEvent] = {}
    reductions: dict[int, TimedEvent] = {}  # by stage, those that wait for the stage's next backward
    for action in flat(rank_program):
        if action.op == "RESHARD":
            continue  # frees memory and takes no time
        name = event_name(action)
        event = events.setdefault(name, TimedEvent(name, costs.length(action.op, action.stage)))
        event.dependencies += [last[key] for key in _depends_on(action, channels) if key in last]
        last.update(dict.fromkeys(_updates(action, channels), event))
        if action.op in REDUCTIONS:
            reductions[action.stage] = event
        elif action.op in ("B", "W") and action.stage in reductions:
            reduction = reductions.pop(action.stage)
            if action.op == "B":
                reduction.during = event
            else:
                reduction.dependencies.append(event)


def _depends_on(action: Action, channels: Channels) -> Iterator[Hashable]:
    """Keys of a rank's last events that an action waits for: compute, its input's message or weights, its channel."""
    yield "work"
    if action.op in SHARD_OPS:
        yield "shards"
        return
    yield "gathered", action.stage
    yield _arrival(action) if action.op in OPS else _channel(action, channels)
    if channels == "blocking":
        yield "anything"


def _updates(action: Action, channels: Channels) -> Iterator[Hashable]:
    """Keys of a rank's last events that an action replaces."""
    if action.op in SHARD_OPS:
        yield "shards"
        if action.op == "UNSHARD":
            yield "gathered", action.stage
        return
    yield "work" if action.op in OPS else _channel(action, channels)
    if action.op.startswith("RECV"):
        yield _arrival(action)
    if channels == "blocking":
        yield "anything"


def _arrival(action: Action) -> Hashable:
    return action.stage, action.op.endswith("F"), action.microbatch


def _channel(action: Action, channels: Channels) -> Hashable:
    """The channel of a message on this rank, as a key."""
    match channels:
        case "direction":
            return action.peer, action.op[:4]
        case "pair":
            return action.peer
        case "rank":
            return "messages"
    return event_name(action)


def event_name(action: Action) -> Name:
    """An event's name, which is the same on both sides of a message."""
    match action.op:
        case "RECV_F":
            return action.stage - 1, "SEND_F", action.microbatch
        case "RECV_B":
            return action.stage + 1, "SEND_B", action.microbatch
    return action.stage, action.op, action.microbatch


def _time(events: Sequence[TimedEvent]) -> None:
    """Compute the start and end of each event, in topological order."""
    followers: dict[int, list[TimedEvent]] = {id(event): [] for event in events}
    unfinished = dict.fromkeys(followers, 0)
    for event in events:
        for before in (*event.dependencies, *filter(None, [event.during])):
            followers[id(before)].append(event)
            unfinished[id(event)] += 1
    ready = deque(event for event in events if not unfinished[id(event)])
    done = 0
    while ready:
        event = ready.popleft()
        event.start = max((before.end for before in event.dependencies), default=0.0)
        event.end = event.start + event.length
        if event.during is not None:
            event.start = max(event.start, event.during.start)
            event.end = max(event.start + event.length, event.during.end)
        done += 1
        for follower in followers[id(event)]:
            unfinished[id(follower)] -= 1
            if not unfinished[id(follower)]:
                ready.append(follower)
    if done < len(followers):
        blocked = [event.name for event in events if unfinished[id(event)]]
        raise DeadlockError("events wait for one another: " + ", ".join(f"{s}{w}{m}" for s, w, m in blocked[:8]))
