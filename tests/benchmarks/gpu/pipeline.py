"""
A pipeline of two GPUs beside one GPU, in one run: `make bench-pipeline-gpu`.

The model is Qwen3-0.6B in bfloat16, a step is 8 microbatches of 2 rows of 4096 tokens, all gradients and AdamW
included. For each schedule and each way to count the head as layers (`stages.head_weighs`) a line says

- tokens per second of both GPUs together, the median of several steps, and over twice those of one GPU;
- from a trace of one step on each rank: the share of the step in which no kernel computes, the share of the time of
  sends and receives in which something computes, and the milliseconds for which the host is blocked.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TINY = "--tiny" in sys.argv
if TINY:
    os.environ["TRITON_INTERPRET"] = "1"

import attrs  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

from benchmarks.gpu.training import DENSE, SMALL, _whole_config  # noqa: E402
from drawloom.components.distributed.device import ComputeDevice  # noqa: E402
from drawloom.components.distributed.mesh import RankMesh  # noqa: E402
from drawloom.components.distributed.precision import DtypeByPurpose  # noqa: E402
from drawloom.components.distributed.processes import TorchProcesses  # noqa: E402
from drawloom.components.distributed.reduce import SumOverParameters  # noqa: E402
from drawloom.components.gradients.synchronise import Synchronise  # noqa: E402
from drawloom.components.kernels.auto import AutoKernels  # noqa: E402
from drawloom.components.loss.next_token import NextToken  # noqa: E402
from drawloom.components.model.qwen3.dense import Qwen3Dense  # noqa: E402
from drawloom.components.optim.adamw import AdamW  # noqa: E402
from drawloom.components.pipeline.executor import Executor  # noqa: E402
from drawloom.components.pipeline.stages import RealStages  # noqa: E402
from drawloom.components.ports.data import Batch  # noqa: E402
from drawloom.components.ports.run import Step  # noqa: E402
from support import pipelines  # noqa: E402

MICROBATCHES, ROWS, LENGTH = (8, 2, 12) if TINY else (8, 2, 4096)
LAYERS = 8 if TINY else 28
STEPS = 2 if TINY else 8
SCHEDULES = ("one_f_one_b", "zero_bubble_1p", "zero_bubble_v", "interleaved_1f1b", "dual_pipe_v")
HEADS = (0, 2) if TINY else (0, 6)
"""The head multiplies by 151,936 x 1024 numbers, a layer by 15.7 million, and 8.4 million more count its attention."""

Interval = tuple[float, float]


def main() -> None:
    """Measure one GPU, then two, in processes of their own; print a table."""
    if "RANK" in os.environ:
        return _worker()
    if not TINY and torch.cuda.device_count() < 2:
        sys.exit("this needs two GPUs; --tiny tries it with two processes on a CPU")
    with tempfile.TemporaryDirectory() as folder:
        flags, program = ["--tiny"] if TINY else [], str(Path(__file__))
        environment = os.environ | {"BENCH_FOLDER": folder, "OMP_NUM_THREADS": "4"}
        for ranks in (1, 2):
            starter = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
            subprocess.run([sys.executable, *starter, program, *flags], env=environment, check=True)


def _worker() -> None:
    kind: Any = "cpu" if TINY else "cuda"
    device = ComputeDevice(kind=kind)
    device.open()
    processes = TorchProcesses(device=device)
    processes.open()
    try:
        mesh = RankMesh(processes=processes, pipeline=processes.world_size, data_replicate=1)
        mesh.open()
        base = Path(os.environ["BENCH_FOLDER"]) / "one.json"
        if processes.world_size == 1:
            seconds = _measured(_run(mesh, device, "one_f_one_b", 0).step, device)
            base.write_text(json.dumps(seconds))
            print(f"one GPU: {_tokens() / seconds:,.0f} tokens/s", flush=True)
            return
        one: float = json.loads(base.read_text())
        for name in SCHEDULES:
            for head in HEADS:
                _line(mesh, device, name, head, one)
    finally:
        processes.close()


def _line(mesh: RankMesh, device: ComputeDevice, name: str, head: int, one: float) -> None:
    """Measure a schedule and print its line."""
    run = _run(mesh, device, name, head)
    seconds = max(mesh.world.gather_json(_measured(run.step, device)))
    traces = mesh.world.gather_json(_traced(run.step, device))
    if mesh.world.rank == 0:
        cells = [f"{_tokens() / seconds:>10,.0f} tokens/s", f"{one / seconds / 2:>7.1%} of two GPUs"]
        for rank, trace in enumerate(traces):
            cells.append(f"rank {rank}: " + ", ".join(f"{key} {value:.3g}" for key, value in trace.items()))
        print(f"{name:<18}head_weighs {head}  " + "; ".join(cells), flush=True)


@attrs.frozen
class Run:
    """A model that is ready to take steps."""

    step: Callable[[], None]


def _run(mesh: RankMesh, device: ComputeDevice, name: str, head: int) -> Run:
    dtype: Any = "float32" if TINY else "bfloat16"
    kernels = AutoKernels(device=device)
    kernels.open()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        config = DENSE | (SMALL | {"num_hidden_layers": LAYERS} if TINY else {})
        path.write_text(json.dumps(_whole_config(config)), "utf-8")
        model = Qwen3Dense(kernels=kernels, config=path)
        model.initialise = _initialise  # type: ignore[assignment,method-assign]
        precision = DtypeByPurpose(parameter=dtype, compute=dtype, gradient=dtype)
        schedule = pipelines.schedule(name)
        stages = RealStages(
            model=model, schedule=schedule, mesh=mesh, device=device, precision=precision, job=pipelines.Job()
        )
        stages.head_weighs = head
        stages.open()
    parts: dict[str, Any] = {"stages": stages, "boundaries": stages, "mesh": mesh, "neighbours": mesh}
    executor = Executor(schedule=schedule, objective=NextToken(), device=device, **parts)
    executor.open()
    synchronise = Synchronise(parameters=stages, mesh=mesh, precision=precision, reduce=SumOverParameters(mesh=mesh))
    optimizer = AdamW(parameters=stages, lr=1e-5)
    optimizer.open()
    batches = [_batch(number, device, config["vocab_size"]) for number in range(MICROBATCHES)]

    def step() -> None:
        state = Step(1, 1)
        state.values["losses"] = executor.train(batches)
        synchronise.run_phase(state)
        optimizer.run_phase(state)

    return Run(step)


def _initialise(_name: str, parameter: Tensor, _seed: int) -> None:
    """Fill a parameter on its device, which is quicker than the numbers that a run starts from."""
    parameter.fill_(1.0) if parameter.ndim == 1 else parameter.normal_(0.0, 0.02)


def _batch(number: int, device: ComputeDevice, vocabulary: int) -> Batch:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(vocabulary, (ROWS, LENGTH + 1), generator=generator).to(device.device)
    positions = torch.arange(LENGTH, device=device.device).expand(ROWS, LENGTH).contiguous()
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions, torch.zeros_like(positions))


def _tokens() -> int:
    return MICROBATCHES * ROWS * LENGTH


def _measured(step: Callable[[], None], device: ComputeDevice) -> float:
    """The median of the seconds of several steps."""
    times = []
    for _ in range(3 + STEPS):
        start = time.perf_counter()
        step()
        if device.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[3:])


def _traced(step: Callable[[], None], device: ComputeDevice) -> dict[str, float]:
    """What a trace of one step says; nothing on a CPU."""
    if device.device.type != "cuda":
        return {}
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as running:
        step()
        torch.cuda.synchronize()
    assert running.profiler is not None and running.profiler.kineto_results is not None
    return summary(running.profiler.kineto_results.events())


def summary(events: Any) -> dict[str, float]:
    """Shares of a step: idle, and messages under computation; and for how many ms the host waited for the GPU."""
    compute: list[Interval] = []
    messages: list[Interval] = []
    blocked = 0.0
    for event in events:
        start, end = event.start_ns() / 1e6, (event.start_ns() + event.duration_ns()) / 1e6
        if "CUDA" in str(event.device_type()):
            (messages if "nccl" in event.name().lower() else compute).append((start, end))
        elif event.name() in ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize"):
            blocked += end - start
    busy, moving = list(_union(compute)), list(_union(messages))
    first, last = min(start for start, _ in busy), max(end for _, end in busy)
    hidden = sum(max(0.0, min(e, f) - max(s, t)) for s, e in moving for t, f in busy if t < e and f > s)
    total = sum(end - start for start, end in moving)
    return {
        "idle": 1 - sum(end - start for start, end in busy) / (last - first),
        "messages_ms": total,
        "messages_hidden": hidden / total if total else 1.0,
        "host_blocked_ms": blocked,
        "step_ms": last - first,
    }


def _union(intervals: list[Interval]) -> Iterator[Interval]:
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


if __name__ == "__main__":
    main()
