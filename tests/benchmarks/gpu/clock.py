"""What a call or a training step costs: device time, host time, memory; how far results are from exact ones."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

REPLAYS = 10
WARM_UPS = 3
CALLS = 20
"""Calls between two looks at the host's clock."""
STEPS = 8
"""Training steps whose median counts, after as many warm-ups as calls have."""

SHORT = 2.0
"""Milliseconds: of calls that take no longer, several stand in a graph, or its launch would count as well."""

Call = Callable[[], Any]


@dataclass(frozen=True)
class Cost:
    """
    Milliseconds on the device, microseconds of the host, and MiB at most beyond what was there before.

    `captured` says whether the time is that of a CUDA graph that was run again, in which the host has no part.
    """

    milliseconds: float
    host_microseconds: float
    mebibytes: float
    captured: bool


def cost(call: Call) -> Cost:
    """The median over many calls."""
    if not torch.cuda.is_available():
        return _cost_on_cpu(call)
    for _ in range(WARM_UPS):
        call()
    torch.cuda.synchronize()
    memory, rough = _memory(call), _median(call)
    short = rough < SHORT
    host, together = host_seconds(call, _device(), REPLAYS if short else 1, CALLS) * 1e6, CALLS if short else 1
    try:
        replay = _captured(call, together)
    except RuntimeError:
        return Cost(rough, host, memory, False)
    return Cost(_median(replay) / together, host, memory, True)


@dataclass(frozen=True)
class StepCost:
    """Of a training step: seconds, and GiB at most, of tensors and of all that was taken from the device for them."""

    seconds: float
    allocated: float
    reserved: float


def step_cost(step: Call, device: torch.device) -> StepCost:
    """
    The median of several steps, which follow each other as in a run.

    The host issues one while the GPU computes the one before, and then waits for the latter's end, as a run does for
    its numbers. Seconds are from end to end on the GPU. On a CPU one step is measured after another one, and the memory
    is unknown. Every rank measures its own: of several that don't wait for each other the slowest counts.
    """
    gpu = device.type == "cuda"
    warm_ups, steps = (WARM_UPS, STEPS) if gpu else (1, 1)
    ends = [_now(gpu)]
    for number in range(warm_ups + steps):
        if gpu and number == warm_ups:
            torch.cuda.reset_peak_memory_stats()
        step()
        ends.append(_now(gpu))
        if gpu:
            ends[-2].synchronize()
    if gpu:
        ends[-1].synchronize()
    times = [one.elapsed_time(other) / 1e3 if gpu else other - one for one, other in pairwise(ends)]
    peaks = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()] if gpu else [float("nan")] * 2
    return StepCost(statistics.median(times[warm_ups:]), *(peak / 2**30 for peak in peaks))


def wait(device: torch.device) -> None:
    """Wait until a GPU has nothing to do."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def host_seconds(call: Call, device: torch.device, batches: int = 3, calls: int = 1) -> float:
    """Of the host for each of some calls, at best of batches: the device is idle when they begin."""
    times: list[float] = []
    for _ in range(batches):
        wait(device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls)
    wait(device)
    return min(times)


def error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The greatest relative error of a whole tensor, in the norm."""
    errors: list[float] = [
        ((ours.double() - theirs.double()).norm() / theirs.double().norm().clamp_min(1e-30)).item()
        for ours, theirs in zip(found, exact, strict=True)
    ]
    return max(errors)


def copy_rate(elements: int) -> float:
    """Bytes a second that a kernel of torch reads and writes: faster than its copy, which is the driver's."""
    source = torch.empty(elements, dtype=torch.bfloat16, device=_device())
    target = torch.empty_like(source)
    return 4 * elements / (cost(lambda: torch.neg(source, out=target)).milliseconds * 1e-3)


def matmul_rate(size: int) -> float:
    """Operations a second of a square product in bfloat16."""
    a, b = (torch.randn(size, size, device=_device()).bfloat16() for _ in "ab")
    return 2 * size**3 / (cost(lambda: a @ b).milliseconds * 1e-3)


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _now(gpu: bool) -> Any:
    """The time at which the device gets here: an event of a GPU's, or seconds."""
    if not gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _cost_on_cpu(call: Call) -> Cost:
    call()
    start = time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    return Cost(seconds * 1e3, seconds * 1e6, float("nan"), False)


def _memory(call: Call) -> float:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = call()
    torch.cuda.synchronize()
    del kept
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _captured(call: Call, times: int) -> Call:
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(times):
            call()
    return graph.replay


def _median(call: Call) -> float:
    times: list[float] = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "se")  # type: ignore[no-untyped-call]
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)
