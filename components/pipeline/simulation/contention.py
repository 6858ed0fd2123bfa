"""
Lines with messages, carried out on paper: when everything happens if messages share channels, or that it never does.

A rank posts a message when it reaches it, and goes on at once. The message is under way when both sides have posted it
and the channel is free. Work waits for the message that it needs. What happens is a graph: each event starts when all
that it comes after has ended, and a circle in it is a deadlock.
"""

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from typing import Literal

import attrs

from drawloom.components.pipeline.program.costs import Costs
from drawloom.components.pipeline.program.timing import Deadlock
from drawloom.components.ports.program import OPS, Action, RankProgram, flat

Channels = Literal["free", "direction", "pair", "rank", "blocking"]
"""
Which messages wait for one another: none; those from one rank to another; those between two ranks; all that a rank
sends and receives. With `blocking` a rank does nothing else while it sends or receives.
"""

Name = tuple[int, str, int]
"""Stage, work and microbatch; a message is named by its sender's, such as (3, "SEND_F", 7)."""


@attrs.define(eq=False)
class Event:
    """Work or a message: what it comes after, and from when to when it happens."""

    name: Name
    length: float
    after: list["Event"] = attrs.field(factory=list)
    start: float = 0.0
    end: float = 0.0


def run_events(lines: Sequence[RankProgram], costs: Costs, channels: Channels = "free") -> dict[Name, Event]:
    """Every event of these lines, timed; Stuck if they never end."""
    events: dict[Name, Event] = {}
    for line in lines:
        _add_line(events, line, costs, channels)
    _time(list(events.values()))
    return events


def _add_line(events: dict[Name, Event], line: RankProgram, costs: Costs, channels: Channels) -> None:
    """Add one rank's events, each after the last ones that it waits for on this rank."""
    last: dict[Hashable, Event] = {}
    for action in flat(line):
        event = events.setdefault(name(action), Event(name(action), costs.length(action.op)))
        event.after += [last[mark] for mark in _waits_for(action, channels) if mark in last]
        last.update(dict.fromkeys(_leaves(action, channels), event))


def _waits_for(action: Action, channels: Channels) -> Iterator[Hashable]:
    """Marks on a rank that an action comes after: work before it, the message that it needs, or those before it."""
    yield "work"
    yield _arrival(action) if action.op in OPS else _queue(action, channels)
    if channels == "blocking":
        yield "anything"


def _leaves(action: Action, channels: Channels) -> Iterator[Hashable]:
    """Marks that an action leaves on a rank."""
    yield "work" if action.op in OPS else _queue(action, channels)
    if action.op.startswith("RECV"):
        yield _arrival(action)
    if channels == "blocking":
        yield "anything"


def _arrival(action: Action) -> Hashable:
    return action.stage, action.op.endswith("F"), action.microbatch


def _queue(action: Action, channels: Channels) -> Hashable:
    """The queue in which a message stands on this rank."""
    match channels:
        case "direction":
            return action.peer, action.op[:4]
        case "pair":
            return action.peer
        case "rank":
            return "messages"
    return name(action)


def name(action: Action) -> Name:
    """An event's name, which is the same on both sides of a message."""
    match action.op:
        case "RECV_F":
            return action.stage - 1, "SEND_F", action.microbatch
        case "RECV_B":
            return action.stage + 1, "SEND_B", action.microbatch
    return action.stage, action.op, action.microbatch


def _time(events: Sequence[Event]) -> None:
    """Give each event its time, those first that come after nothing."""
    followers: dict[int, list[Event]] = {id(event): [] for event in events}
    open_ends = {id(event): len(event.after) for event in events}
    for event in events:
        for before in event.after:
            followers[id(before)].append(event)
    ready = deque(event for event in events if not event.after)
    done = 0
    while ready:
        event = ready.popleft()
        event.start = max((before.end for before in event.after), default=0.0)
        event.end = event.start + event.length
        done += 1
        for follower in followers[id(event)]:
            open_ends[id(follower)] -= 1
            if not open_ends[id(follower)]:
                ready.append(follower)
    if done < len(followers):
        stuck = [event.name for event in events if open_ends[id(event)]]
        raise Deadlock("these wait for one another: " + ", ".join(f"{s}{w}{m}" for s, w, m in stuck[:8]))
