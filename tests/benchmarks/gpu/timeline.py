"""Activity of the GPU and the host in traced steps, read from a run's `traces/*.json.gz`."""

import gzip
import json
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

Interval = tuple[float, float]
"""Start and end, in milliseconds."""

COPIES = ("gpu_memcpy", "gpu_memset")
ON_GPU = ("kernel", *COPIES)
RUNTIME = ("cuda_runtime", "cuda_driver")
RANGE = "user_annotation"
MAIN, OTHER = "the steps' thread", "another thread"
STEP = re.compile(r"step (\d+)")
WAIT = re.compile(r"cu(da)?(Stream|Event|Device|Ctx)Synchronize(_\w+)?|cu(da)?Memcpy(?!\w*Async)\w*")
"""Calls that wait for the GPU. A copy waits unless it is asynchronous."""


class Operation(NamedTuple):
    """An operation on the GPU. `issued` is the time of the host's launch, or None if the trace has no launch."""

    name: str
    start: float
    end: float
    issued: float | None
    kernel: bool


class Call(NamedTuple):
    """A call on a host thread."""

    name: str
    category: str
    thread: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The host's steps by number, the GPU's operations and the host's calls. Times are in milliseconds."""

    steps: dict[int, Interval]
    operations: Sequence[Operation]
    calls: Sequence[Call]

    @cached_property
    def spans(self) -> dict[int, Interval]:
        """
        Return the GPU's time by step, without holes: from a step's first kernel to the next step's first kernel.

        Idle time at the end of a step thereby counts for this step. The last step ends with its last kernel.
        """
        first, end = dict[int, float](), 0.0
        for operation in self.operations:
            step = None if operation.issued is None or not operation.kernel else self.step_at(operation.issued)
            if step is not None:
                first[step] = min(first.get(step, operation.start), operation.start)
                end = max(end, operation.end)
        numbers = sorted(first)
        bounds = accumulate([*(first[number] for number in numbers), end], max)
        return dict(zip(numbers, pairwise(bounds), strict=True))

    def step_at(self, time: float) -> int | None:
        """Return the step that the host was in or had just ended, or None before the first step."""
        index = bisect_right(self._starts, time)
        return self._numbers[index - 1] if index else None

    def gaps(self, kernels_alone: bool = False) -> dict[int, list[Interval]]:
        """Return the intervals without operations, or without kernels, on all streams, by step."""
        busy = list(
            union(
                (operation.start, operation.end)
                for operation in self.operations
                if operation.kernel or not kernels_alone
            )
        )
        starts, gaps_by_step = [start for start, _ in busy], dict[int, list[Interval]]()
        for number, (begin, end) in self.spans.items():
            inner = busy[max(0, bisect_right(starts, begin) - 1) : bisect_left(starts, end)]
            edges = pairwise([(begin, begin), *inner, (end, end)])
            between = [(max(before[1], begin), after[0]) for before, after in edges]
            gaps_by_step[number] = [(start, until) for start, until in between if until > start]
        return gaps_by_step

    def waits(self) -> list[tuple[int, str, str, float]]:
        """Return the host's waits for the GPU within steps: step, call name, thread and milliseconds."""
        calls: list[tuple[int, str, str, float]] = []
        for call in self.calls:
            if call.category in RUNTIME and WAIT.fullmatch(call.name):
                step = self.step_at(call.start)
                if step is not None and call.start < self.steps[step][1]:
                    calls.append((step, call.name, self.threads[call.thread], call.end - call.start))
        return calls

    @cached_property
    def threads(self) -> dict[int, str]:
        """Return thread id -> role: the steps' thread, autograd's thread, or another one."""
        names: dict[int, str] = defaultdict(lambda: OTHER)
        for call in self.calls:
            if STEP.fullmatch(call.name):
                names[call.thread] = MAIN
            elif call.name.startswith("autograd::") and call.thread not in names:
                names[call.thread] = "autograd"
        return names

    def doing(self, gap: Interval) -> str:
        """Describe the host's activity in a gap: the surrounding ranges, and every thread's innermost call."""
        by_thread: dict[int, list[Call]] = defaultdict(list)
        for call in self.calls:
            if _overlap((call.start, call.end), gap) > 0 and not call.name.startswith("ProfilerStep"):
                by_thread[call.thread].append(call)
        descriptions: list[str] = []
        for thread, calls in sorted(by_thread.items(), key=lambda item: self.threads[item[0]] != MAIN):
            half = (gap[1] - gap[0]) / 2
            around = sorted(
                (call for call in calls if _overlap((call.start, call.end), gap) >= half),
                key=lambda call: (call.start, -call.end),
            )
            names = [call.name for call in around if call.category == RANGE and not STEP.fullmatch(call.name)]
            names += [call.name for call in around[-1:] if call.category != RANGE]
            if short := sum(call.category != RANGE and call not in around for call in calls):
                names.append(f"{short} shorter ones")
            if names:
                descriptions.append("" if self.threads[thread] == MAIN else f"{self.threads[thread]}: ")
                descriptions[-1] += " > ".join(names)
        return "; ".join(descriptions[:3]) or "nothing that is traced"

    def after(self, gap: Interval) -> str:
        """Describe the operation that ended a gap, and when the host issued it."""
        index = bisect_left(self._operations_by_start, (gap[1],))
        if index == len(self._operations_by_start):
            return "the end"
        _, name, issued = self._operations_by_start[index]
        if issued is None:
            return name
        if issued < gap[0]:
            return f"{name}, issued {gap[0] - issued:.2f} ms before it"
        return f"{name}, issued {issued - gap[0]:.2f} ms into it"

    @cached_property
    def _operations_by_start(self) -> list[tuple[float, str, float | None]]:
        return sorted(
            ((operation.start, operation.name[:60], operation.issued) for operation in self.operations),
            key=lambda operation: operation[0],
        )

    @cached_property
    def _numbers(self) -> list[int]:
        return sorted(self.steps)

    @cached_property
    def _starts(self) -> list[float]:
        return [self.steps[number][0] for number in self._numbers]


def read(path: Path, on_gpu: Sequence[str] = ON_GPU) -> Timeline:
    """Read a trace file. `on_gpu=("cpu_op",)` treats torch's CPU operations as GPU operations."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return parse(json.load(file), on_gpu)


def parse(trace: dict[str, Any], on_gpu: Sequence[str] = ON_GPU) -> Timeline:
    """Parse a trace. Events without a name, a time or a duration are ignored."""
    complete = [event for event in trace["traceEvents"] if event.get("ph") == "X" and {"name", "ts", "dur"} <= {*event}]
    base = min((event["ts"] for event in complete), default=0.0)
    steps, calls, events_on_gpu = dict[int, Interval](), list[Call](), list[tuple[dict[str, Any], Interval]]()
    launch_times = dict[Any, float]()
    for event in complete:
        name, category, start = event["name"], event.get("cat", ""), (event["ts"] - base) / 1e3
        end = start + event["dur"] / 1e3
        if category in on_gpu:
            events_on_gpu.append((event, (start, end)))
        if category in (RANGE, "cpu_op", *RUNTIME):
            calls.append(Call(name, category, event.get("tid", 0), start, end))
        if category in RUNTIME and (correlation := _correlation(event)) is not None:
            launch_times[correlation] = start
        if category == RANGE and (number := STEP.fullmatch(name)):
            steps[int(number[1])] = start, end
    operations = [
        Operation(event["name"], *span, _issue_time(event, span, launch_times), event.get("cat") not in COPIES)
        for event, span in events_on_gpu
    ]
    return Timeline(steps, operations, calls)


def iterate_gpu_operations(running: Any) -> Iterator[tuple[str, Interval]]:
    """Yield the name and the interval in ms of every GPU operation in a `torch.profiler.profile` that has ended."""
    for event in running.profiler.kineto_results.events():
        if "CUDA" in str(event.device_type()) and not event.is_user_annotation():
            start = event.start_ns() / 1e6
            yield event.name(), (start, start + event.duration_ns() / 1e6)


def union(intervals: Iterable[Interval]) -> Iterator[Interval]:
    """Yield the union of intervals as disjoint intervals."""
    current: Interval | None = None
    for start, end in sorted(intervals):
        if current and start <= current[1]:
            current = current[0], max(current[1], end)
        else:
            if current:
                yield current
            current = start, end
    if current:
        yield current


def _issue_time(event: dict[str, Any], span: Interval, issued: dict[Any, float]) -> float | None:
    return span[0] if event.get("cat") not in ON_GPU else issued.get(_correlation(event))


def _correlation(event: dict[str, Any]) -> Any:
    return event.get("args", {}).get("correlation")


def _overlap(first: Interval, second: Interval) -> float:
    return max(0.0, min(first[1], second[1]) - max(first[0], second[0]))
