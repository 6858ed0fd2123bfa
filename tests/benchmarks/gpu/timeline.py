"""What the GPU and the host did in steps that a run's profiler has traced: `traces/*.json.gz` of its folder."""

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
"""Calls after which the GPU has done what they name; a copy waits unless it is asynchronous."""


class Operation(NamedTuple):
    """What ran on the GPU; `issued` is when the host asked for it, None if the trace does not say."""

    name: str
    start: float
    end: float
    issued: float | None
    kernel: bool


class Call(NamedTuple):
    """What a thread of the host did."""

    name: str
    category: str
    thread: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Steps by number, as the host went through them; what ran on the GPU; and what the host did. Milliseconds."""

    steps: dict[int, Interval]
    operations: Sequence[Operation]
    calls: Sequence[Call]

    @cached_property
    def spans(self) -> dict[int, Interval]:
        """
        The GPU's time by step, without holes: from the first kernel of one step to that of the next.

        What the GPU waits for at the end of a step is thereby that step's. The last one ends with its last kernel.
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
        """The step that the host was in, or had just ended; None before the first."""
        index = bisect_right(self._starts, time)
        return self._numbers[index - 1] if index else None

    def gaps(self, kernels_alone: bool = False) -> dict[int, list[Interval]]:
        """When nothing ran on the GPU, on any stream, or no kernel: by step, within its span."""
        busy = list(union((each.start, each.end) for each in self.operations if each.kernel or not kernels_alone))
        starts, found = [start for start, _ in busy], dict[int, list[Interval]]()
        for number, (begin, end) in self.spans.items():
            inner = busy[max(0, bisect_right(starts, begin) - 1) : bisect_left(starts, end)]
            edges = pairwise([(begin, begin), *inner, (end, end)])
            between = [(max(one[1], begin), other[0]) for one, other in edges]
            found[number] = [(start, until) for start, until in between if until > start]
        return found

    def waits(self) -> list[tuple[int, str, str, float]]:
        """Calls that wait for the GPU, within steps: the step, the name, whose thread it was, and milliseconds."""
        found: list[tuple[int, str, str, float]] = []
        for call in self.calls:
            if call.category in RUNTIME and WAIT.fullmatch(call.name):
                step = self.step_at(call.start)
                if step is not None and call.start < self.steps[step][1]:
                    found.append((step, call.name, self.threads[call.thread], call.end - call.start))
        return found

    @cached_property
    def threads(self) -> dict[int, str]:
        """What a thread does: the steps, the backward passes that autograd has threads of its own for, or another."""
        names: dict[int, str] = defaultdict(lambda: OTHER)
        for call in self.calls:
            if STEP.fullmatch(call.name):
                names[call.thread] = MAIN
            elif call.name.startswith("autograd::") and call.thread not in names:
                names[call.thread] = "autograd"
        return names

    def doing(self, gap: Interval) -> str:
        """What the host did in most of some time: the ranges around it, and each thread's innermost call."""
        by_thread: dict[int, list[Call]] = defaultdict(list)
        for call in self.calls:
            if _overlap((call.start, call.end), gap) > 0 and not call.name.startswith("ProfilerStep"):
                by_thread[call.thread].append(call)
        said: list[str] = []
        for thread, calls in sorted(by_thread.items(), key=lambda item: self.threads[item[0]] != MAIN):
            half = (gap[1] - gap[0]) / 2
            around = sorted(
                (call for call in calls if _overlap((call.start, call.end), gap) >= half),
                key=lambda call: (call.start, -call.end),
            )
            names = [each.name for each in around if each.category == RANGE and not STEP.fullmatch(each.name)]
            names += [each.name for each in around[-1:] if each.category != RANGE]
            if short := sum(each.category != RANGE and each not in around for each in calls):
                names.append(f"{short} shorter ones")
            if names:
                said.append("" if self.threads[thread] == MAIN else f"{self.threads[thread]}: ")
                said[-1] += " > ".join(names)
        return "; ".join(said[:3]) or "nothing that is traced"

    def after(self, gap: Interval) -> str:
        """What ended a gap, and when the host had asked for it."""
        index = bisect_left(self._by_start, (gap[1],))
        if index == len(self._by_start):
            return "the end"
        _, name, issued = self._by_start[index]
        if issued is None:
            return name
        if issued < gap[0]:
            return f"{name}, issued {gap[0] - issued:.2f} ms before it"
        return f"{name}, issued {issued - gap[0]:.2f} ms into it"

    @cached_property
    def _by_start(self) -> list[tuple[float, str, float | None]]:
        return sorted(((each.start, each.name[:60], each.issued) for each in self.operations), key=lambda each: each[0])

    @cached_property
    def _numbers(self) -> list[int]:
        return sorted(self.steps)

    @cached_property
    def _starts(self) -> list[float]:
        return [self.steps[number][0] for number in self._numbers]


def read(path: Path, on_gpu: Sequence[str] = ON_GPU) -> Timeline:
    """A trace file. Of a run on a CPU, `on_gpu=("cpu_op",)` takes torch's operations for those of a GPU."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return parsed(json.load(file), on_gpu)


def parsed(trace: dict[str, Any], on_gpu: Sequence[str] = ON_GPU) -> Timeline:
    """The same of what is in the file; events without a name, a time or a length are left out."""
    complete = [event for event in trace["traceEvents"] if event.get("ph") == "X" and {"name", "ts", "dur"} <= {*event}]
    base = min((event["ts"] for event in complete), default=0.0)
    steps, calls, ran = dict[int, Interval](), list[Call](), list[tuple[dict[str, Any], Interval]]()
    issued = dict[Any, float]()
    for event in complete:
        name, category, start = event["name"], event.get("cat", ""), (event["ts"] - base) / 1e3
        end = start + event["dur"] / 1e3
        if category in on_gpu:
            ran.append((event, (start, end)))
        if category in (RANGE, "cpu_op", *RUNTIME):
            calls.append(Call(name, category, event.get("tid", 0), start, end))
        if category in RUNTIME and (correlation := _correlation(event)) is not None:
            issued[correlation] = start
        if category == RANGE and (number := STEP.fullmatch(name)):
            steps[int(number[1])] = start, end
    operations = [
        Operation(event["name"], *span, _issued(event, span, issued), event.get("cat") not in COPIES)
        for event, span in ran
    ]
    return Timeline(steps, operations, calls)


def union(intervals: Iterable[Interval]) -> Iterator[Interval]:
    """The same time, in intervals that don't overlap."""
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


def _issued(event: dict[str, Any], span: Interval, issued: dict[Any, float]) -> float | None:
    return span[0] if event.get("cat") not in ON_GPU else issued.get(_correlation(event))


def _correlation(event: dict[str, Any]) -> Any:
    return event.get("args", {}).get("correlation")


def _overlap(one: Interval, other: Interval) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))
