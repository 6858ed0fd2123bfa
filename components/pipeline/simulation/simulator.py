"""
A program's simulation: its makespan, its bubble, and every rank's peak memory.

Messages of the lowered program contend for channels. A rank posts a message when it reaches the message, and continues
at once. The transfer starts when both sides have posted the message and the channel is free. A compute action waits for
the message that it consumes. Events form a dependency graph: an event starts when all its dependencies have ended, and
a cycle is a deadlock.

Sharded parameters are gathered, and gradients reduced, one after another while a rank computes. The first forward pass
of a stage waits for its parameters. Gradients of a B are reduced block by block during B, so that the reduction can't
end before B. Gradients of a W are reduced after W: it runs no hooks to start the reduction.

Activations are copied to host memory, and back, one after another in each direction. The second pass after OFFLOAD
waits for the copy, whose memory is then free, and a backward pass waits for its RELOAD.
"""

from collections.abc import Hashable, Iterator, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Literal

import attrs
import numpy as np

from drawloom.components.pipeline.program.lowering import (
    Sharding,
    find_consumer_ranks,
    insert_messages,
    insert_offload_actions,
)
from drawloom.components.pipeline.program.timing import Costs, DeadlockError, Floats, compute_timing
from drawloom.ports import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    OPS,
    Action,
    Program,
    RankProgram,
    iterate_actions,
)

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
    sorter = TopologicalSorter({event: (*event.dependencies, *filter(None, [event.during])) for event in events})
    try:
        sorter.prepare()
    except CycleError as error:
        keys = sorted({event.key for event in error.args[1]})[:8]
        raise DeadlockError(f"events wait for one another: {', '.join(f'{s}{w}{m}' for s, w, m in keys)}") from error
    while ready := sorter.get_ready():
        for event in ready:
            event.start = max((before.end for before in event.dependencies), default=0.0)
            event.end = event.start + event.length
            if event.during is not None:
                event.start = max(event.start, event.during.start)
                event.end = max(event.start + event.length, event.during.end)
        sorter.done(*ready)


@attrs.frozen
class Bar:
    """Action on a timeline, with a flag for overlap with the previous action."""

    action: Action
    start: float
    end: float
    overlaps_previous: bool


@attrs.frozen(eq=False)
class Simulation:
    """Simulation result: every action's start and end time."""

    program: Program
    costs: Costs
    channels: Channels
    start: Floats
    end: Floats
    sharding: Sharding | None = None
    shard_bars: Sequence[Sequence[Bar]] = ()
    """Parameter gathers and gradient reductions by rank, in order; empty without shards."""
    transfer_bars: Sequence[Sequence[Bar]] = ()
    """Activation copies to host memory and back by rank, in order; empty without offloading."""

    def iterate_bars(self, rank: int) -> Iterator[Bar]:
        """Yield a rank's actions with their times, in order."""
        for row in range(*self.program.bounds[rank : rank + 2]):
            action, overlaps_previous = self.program.action(row), bool(self.program.overlaps_previous[row])
            yield Bar(action, float(self.start[row]), float(self.end[row]), overlaps_previous)

    @property
    def makespan(self) -> float:
        """Return the time from the first start to the last end: a step's time if all ranks begin and end together."""
        return max(float(self.end.max(initial=0.0)), *(bar.end for bars in self.shard_bars for bar in bars), 0.0)

    @property
    def busiest_rank_compute_time(self) -> float:
        """Return the busiest rank's compute time, a lower bound for the makespan."""
        length = self.end - self.start
        return max(float(length[self.program.rows(rank)].sum()) for rank in range(self.program.ranks))

    @property
    def bubble_fraction(self) -> float:
        """Return the idle fraction of the makespan."""
        return _compute_idle_fraction(self.busiest_rank_compute_time, self.makespan)

    @property
    def longest_rank_span(self) -> float:
        """Return the longest time from a rank's first start to its last end: a step's time if steps overlap."""
        return max(
            (end - start for start, end in map(self._find_first_and_last, range(self.program.ranks))),
            default=0.0,
        )

    def _find_first_and_last(self, rank: int) -> tuple[float, float]:
        """Return a rank's first start and last end, including actions on shards."""
        rows, shards = self.program.rows(rank), self.shard_bars[rank] if self.shard_bars else ()
        starts = [*self.start[rows].tolist(), *(bar.start for bar in shards)]
        ends = [*self.end[rows].tolist(), *(bar.end for bar in shards)]
        return min(starts, default=0.0), max(ends, default=0.0)

    @property
    def longest_span_bubble_fraction(self) -> float:
        """Return the idle fraction of `longest_rank_span`."""
        return _compute_idle_fraction(self.busiest_rank_compute_time, self.longest_rank_span)

    @property
    def peak_activations(self) -> list[int]:
        """Return every rank's peak activation count: one per stage and microbatch, from F until B or I."""
        return self._count_peak_open_ops(FORWARD, BACKWARD, BACKWARD_INPUT)

    @property
    def peak_microbatches_in_flight(self) -> list[int]:
        """Return every rank's peak microbatch count: one per stage, from F until the weight gradients (B or W)."""
        return self._count_peak_open_ops(FORWARD, BACKWARD, BACKWARD_WEIGHT)

    @property
    def peak_pending_weight_grads(self) -> list[int]:
        """Return every rank's peak count of weight gradients that are pending between I and W."""
        return self._count_peak_open_ops(BACKWARD_INPUT, BACKWARD_WEIGHT)

    @property
    def peak_p2p_tensors(self) -> list[int]:
        """Return every rank's peak tensor count in P2P buffers: in flight, or received and not consumed yet."""
        rank_programs = _lower_all_ranks(self.program, self.costs, self.sharding)
        events = simulate_events(rank_programs, self.costs, self.channels)
        return [_count_peak_p2p_tensors(rank_program, events) for rank_program in rank_programs]

    def _count_peak_open_ops(self, opening: int, *closing: int) -> list[int]:
        """Return every rank's peak count of open ops: an `opening` op is open until its `closing` op."""
        if not np.isin(self.program.op, closing).any():
            return [0] * self.program.ranks  # forward passes alone keep no activations
        change = (self.program.op == opening).astype(np.int64) - np.isin(self.program.op, closing)
        rank_programs = (change[self.program.rows(rank)] for rank in range(self.program.ranks))
        return [int(rank_program.cumsum().max(initial=0)) for rank_program in rank_programs]

    @property
    def message_count(self) -> int:
        """Count the tensors sent between ranks."""
        return int((find_consumer_ranks(self.program) != self.program.rank_by_action).sum())

    @property
    def action_counts(self) -> dict[str, int]:
        """Count the actions by op."""
        return {work: int((self.program.op == number).sum()) for number, work in enumerate(OPS)}


def simulate(
    program: Program, costs: Costs, channels: Channels = "free", sharding: Sharding | None = None
) -> Simulation:
    """Simulate a program, optionally with sharded parameters; raise DeadlockError if it can't finish."""
    # Without contention the vectorized timing suffices, which is far faster than simulating single events.
    if channels == "free" and sharding is None and not program.offloaded:
        timing = compute_timing(program, costs)
        return Simulation(program, costs, channels, timing.start, timing.end)
    rank_programs = _lower_all_ranks(program, costs, sharding)
    events = simulate_events(rank_programs, costs, channels)
    rows = [events[get_event_key(program.action(row))] for row in range(len(program.stage))]
    start, end = (np.array([getattr(event, edge) for event in rows]) for edge in ("start", "end"))
    shard_bars = [_collect_bars(line, events, SHARD_OPS) for line in rank_programs] if sharding else ()
    transfer_bars = [_collect_bars(line, events, TRANSFER_OPS) for line in rank_programs] if program.offloaded else ()
    return Simulation(
        program, costs, channels, start, end, sharding=sharding, shard_bars=shard_bars, transfer_bars=transfer_bars
    )


def _lower_all_ranks(program: Program, costs: Costs, sharding: Sharding | None) -> list[RankProgram]:
    """
    Return every rank's program with its messages and transfers, and with its actions on shards if there is `sharding`.

    Actions are ordered by their times under these costs.
    """
    timing = compute_timing(program, costs)
    lines = [
        insert_offload_actions(insert_messages(program, timing, rank), program.offloaded)
        for rank in range(program.ranks)
    ]
    return [sharding.insert_actions(line) for line in lines] if sharding else lines


def _collect_bars(line: RankProgram, events: Events, ops: Sequence[str]) -> list[Bar]:
    """Return bars for a rank's actions with these ops, on shards or the host link."""
    timed = [(action, events[get_event_key(action)]) for action in iterate_actions(line) if action.op in ops]
    return [Bar(action, event.start, event.end, overlaps_previous=False) for action, event in timed]


def _count_peak_p2p_tensors(rank_program: RankProgram, events: Events) -> int:
    """Return the peak tensor count in one rank's P2P buffers."""
    peak, now = 0, 0.0
    sent: list[float] = []
    received: set[tuple[int, bool, int]] = set()
    for action in iterate_actions(rank_program):
        key = action.stage, action.op.endswith("F"), action.microbatch
        if action.op in OPS:
            received.discard(key)
            now = events[get_event_key(action)].end
        # A sent tensor stays alive until its transfer ends.
        sent = [end for end in sent if end > now]
        if action.op.startswith("SEND"):
            sent.append(events[get_event_key(action)].end)
        elif action.op.startswith("RECV_"):
            received.add(key)
        peak = max(peak, len(sent) + len(received))
    return peak


def _compute_idle_fraction(busy: float, length: float) -> float:
    """Return the idle fraction during `length` if `busy` is the compute time."""
    return max(0.0, 1 - busy / length) if length else 0.0  # sums of the same lengths may differ by rounding
