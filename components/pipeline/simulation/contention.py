"""
Simulation of lowered programs whose messages contend for channels.

A rank posts a message when it reaches the message, and continues at once. The transfer starts when both sides have
posted the message and the channel is free. A compute action waits for the message that it consumes. Events form a
dependency graph: an event starts when all its dependencies have ended, and a cycle is a deadlock.

Sharded parameters are gathered, and gradients reduced, one after another while a rank computes. The first forward pass
of a stage waits for its parameters. Gradients of a B are reduced block by block during B, so that the reduction can't
end before B. Gradients of a W are reduced after W: it runs no hooks to start the reduction.

Activations are copied to host memory, and back, one after another in each direction. The second pass after OFFLOAD
waits for the copy, whose memory is then free, and a backward pass waits for its RELOAD.
"""

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from typing import Literal

import attrs

from drawloom.components.pipeline.program.timing import Costs, DeadlockError
from drawloom.ports import OPS, Action, RankProgram, iterate_actions

Channels = Literal["free", "direction", "pair", "rank", "blocking"]
"""
Messages that share a channel: none (free); messages from one rank to another (direction); messages between two ranks
(pair); all messages of a rank (rank). With `blocking`, a rank does nothing else while it sends or receives.
"""

REDUCTIONS = ("REDUCE_SCATTER", "REDUCE_GRAD")
SHARD_OPS = ("UNSHARD", *REDUCTIONS)
TRANSFER_OPS = ("OFFLOAD", "RELOAD")

EventKey = tuple[int, str, int]
"""Stage, op and microbatch; a message has the key of its send, such as (3, "SEND_F", 7)."""


@attrs.define(eq=False)
class TimedEvent:
    """
    Compute action, message, transfer or action on shards, with its dependencies, start and end.

    An event `during` another event starts and ends no earlier than the other event.
    """

    key: EventKey
    length: float
    dependencies: list["TimedEvent"] = attrs.field(factory=list)
    during: "TimedEvent | None" = None
    start: float = 0.0
    end: float = 0.0


Events = dict[EventKey, TimedEvent]


def simulate_events(rank_programs: Sequence[RankProgram], costs: Costs, channels: Channels = "free") -> Events:
    """Simulate all ranks' lowered programs and return the timed events; DeadlockError if they never end."""
    events: Events = {}
    for rank_program in rank_programs:
        _add_rank_events(events, rank_program, costs, channels)
    _compute_event_times(list(events.values()))
    return events


def _add_rank_events(events: Events, rank_program: RankProgram, costs: Costs, channels: Channels) -> None:
    """Add a rank's events, with their dependencies on earlier events."""
    last: dict[Hashable, TimedEvent] = {}
    reductions: dict[int, TimedEvent] = {}  # by stage, reductions that wait for the next backward pass
    before_last, since_last = list[TimedEvent](), list[TimedEvent]()  # offloads begun before and since the last pass
    for action in iterate_actions(rank_program):
        if action.op == "RESHARD":
            continue  # it frees memory and takes no time
        key = get_event_key(action)
        event = events.setdefault(key, TimedEvent(key, costs.get_duration(action.op, action.stage)))
        event.dependencies += [last[key] for key in _list_awaited_event_keys(action, channels) if key in last]
        last.update(dict.fromkeys(_list_keys_later_actions_await(action, channels), event))
        if action.op in OPS:
            event.dependencies += before_last
            before_last, since_last = since_last, []
        if action.op == "OFFLOAD":
            since_last.append(event)
        elif action.op in REDUCTIONS:
            reductions[action.stage] = event
        elif action.op in ("B", "W") and action.stage in reductions:
            reduction = reductions.pop(action.stage)
            if action.op == "B":
                reduction.during = event
            else:
                reduction.dependencies.append(event)


def _list_awaited_event_keys(action: Action, channels: Channels) -> Iterator[Hashable]:
    """Yield keys for the latest events an action waits for: compute, message, weights, channel."""
    yield "work"
    if action.op in SHARD_OPS:
        yield "shards"
        return
    if action.op in TRANSFER_OPS:
        yield action.op
        yield "offloaded", action.stage, action.microbatch
        return
    yield "gathered", action.stage
    if action.op in ("B", "I"):
        yield "reloaded", action.stage, action.microbatch
    yield _get_arrival_key(action) if action.op in OPS else _get_channel_key(action, channels)
    if channels == "blocking":
        yield "anything"


def _list_keys_later_actions_await(action: Action, channels: Channels) -> Iterator[Hashable]:
    """Yield an action's keys as the latest event, for later actions to wait for."""
    if action.op in SHARD_OPS:
        yield "shards"
        if action.op == "UNSHARD":
            yield "gathered", action.stage
        return
    if action.op in TRANSFER_OPS:
        yield action.op
        yield f"{action.op.lower()}ed", action.stage, action.microbatch
        return
    yield "work" if action.op in OPS else _get_channel_key(action, channels)
    if action.op.startswith("RECV"):
        yield _get_arrival_key(action)
    if channels == "blocking":
        yield "anything"


def _get_arrival_key(action: Action) -> Hashable:
    """Return a key for an input's arrival, the same for the receive and the pass consuming it."""
    return action.stage, action.op.endswith("F"), action.microbatch


def _get_channel_key(action: Action, channels: Channels) -> Hashable:
    """Return the channel of a message on this rank, as a key."""
    match channels:
        case "direction":
            return action.peer, action.op[:4]
        case "pair":
            return action.peer
        case "rank":
            return "messages"
    return get_event_key(action)


def get_event_key(action: Action) -> EventKey:
    """Return an action's key among the events, the same for both sides of a message."""
    match action.op:
        case "RECV_F":
            return action.stage - 1, "SEND_F", action.microbatch
        case "RECV_B":
            return action.stage + 1, "SEND_B", action.microbatch
    return action.stage, action.op, action.microbatch


def _compute_event_times(events: Sequence[TimedEvent]) -> None:
    """Compute the start and end of every event, in topological order."""
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
        blocked = [event.key for event in events if unfinished[id(event)]]
        raise DeadlockError("events wait for one another: " + ", ".join(f"{s}{w}{m}" for s, w, m in blocked[:8]))
