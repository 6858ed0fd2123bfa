"""Device time, host time and memory of a call or a training step, and errors against exact results."""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

REPLAYS = 10
WARM_UPS = 3
CALLS = 20
"""Calls between two readings of the host's clock."""
STEPS = 8
"""Measured training steps, after WARM_UPS steps."""

SHORT = 2.0
"""Milliseconds. Shorter calls are repeated within a CUDA graph, so that the graph's launch hardly counts."""

Call = Callable[[], Any]


@dataclass(frozen=True)
class Cost:
    """
    Milliseconds on the device, microseconds on the host, and peak MiB beyond the memory in use before.

    `captured` is true if a replayed CUDA graph was timed, without the host.
    """

    milliseconds: float
    host_microseconds: float
    mebibytes: float
    captured: bool


def cost(call: Call) -> Cost:
    """Measure a call, and return medians over many calls."""
    if not torch.cuda.is_available():
        return _cost_on_cpu(call)
    for _ in range(WARM_UPS):
        call()
    torch.cuda.synchronize()
    memory, rough_milliseconds = _memory(call), _median(call)
    short = rough_milliseconds < SHORT
    host, calls_per_replay = host_seconds(call, _device(), REPLAYS if short else 1, CALLS) * 1e6, CALLS if short else 1
    try:
        replay = _capture(call, calls_per_replay)
    except RuntimeError:
        return Cost(rough_milliseconds, host, memory, False)
    return Cost(_median(replay) / calls_per_replay, host, memory, True)


@dataclass(frozen=True)
class StepCost:
    """A training step's seconds, and its peak GiB of allocated and reserved memory."""

    seconds: float
    allocated: float
    reserved: float


def step_cost(step: Call, device: torch.device) -> StepCost:
    """
    Measure consecutive training steps, and return the median.

    The host issues a step while the GPU computes the step before, and then waits for the earlier step's end, as a run
    does for its metrics. Seconds are between the ends of steps on the GPU. On a CPU the steps run one by one, and the
    memory is unknown. Every rank measures itself; if ranks do not wait for each other, the slowest one counts.
    """
    gpu = device.type == "cuda"
    warm_ups, steps = (WARM_UPS, STEPS) if gpu else (1, 1)
    ends = [now(gpu)]
    for number in range(warm_ups + steps):
        if gpu and number == warm_ups:
            torch.cuda.reset_peak_memory_stats()
        step()
        ends.append(now(gpu))
        if gpu:
            ends[-2].synchronize()
    if gpu:
        ends[-1].synchronize()
    times = [start.elapsed_time(end) / 1e3 if gpu else end - start for start, end in pairwise(ends)]
    peaks = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()] if gpu else [float("nan")] * 2
    return StepCost(statistics.median(times[warm_ups:]), *(peak / 2**30 for peak in peaks))


def wait(device: torch.device) -> None:
    """Wait until a GPU is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def host_seconds(call: Call, device: torch.device, batches: int = 3, calls: int = 1) -> float:
    """Return the host's seconds per call in the fastest batch. The device is idle when a batch begins."""
    times: list[float] = []
    for _ in range(batches):
        wait(device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls)
    wait(device)
    return min(times)


def error(results: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Return the largest relative error of a tensor, in the Euclidean norm."""
    relative_errors: list[float] = [
        ((result.double() - exact_result.double()).norm() / exact_result.double().norm().clamp_min(1e-30)).item()
        for result, exact_result in zip(results, exact, strict=True)
    ]
    return max(relative_errors)


def copy_rate(elements: int) -> float:
    """Return the bytes per second that a torch kernel reads and writes. It is faster than the driver's copy."""
    source = torch.empty(elements, dtype=torch.bfloat16, device=_device())
    target = torch.empty_like(source)
    return 4 * elements / (cost(lambda: torch.neg(source, out=target)).milliseconds * 1e-3)


def matmul_rate(size: int) -> float:
    """Operations a second of a square product in bfloat16."""
    a, b = (torch.randn(size, size, device=_device()).bfloat16() for _ in "ab")
    return 2 * size**3 / (cost(lambda: a @ b).milliseconds * 1e-3)


def show_kernels(run: Call, count: int, before: Mapping[str, float] = MappingProxyType({})) -> dict[str, float]:
    """Print the slowest kernels' times, or with times from `before` the most grown ones; return all in ms."""
    run()
    with profile(activities=[ProfilerActivity.CUDA]) as running:
        for _ in range(5):
            run()
        torch.cuda.synchronize()
    times: Counter[str] = Counter()
    for event in running.key_averages():
        times[event.key[:60]] += event.self_device_time_total / 5000
    for name in sorted(times, key=lambda name: before.get(name, 0.0) - times[name])[:count]:
        print(f"    {name:60} {times[name]:.3f} ms", flush=True)
    return dict(times)


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def now(gpu: bool) -> Any:
    """Record an event on the GPU, or return the host's seconds."""
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


def _capture(call: Call, times: int) -> Call:
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
