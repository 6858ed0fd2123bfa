"""
A two-GPU pipeline compared with one GPU, in one run: `make bench NAME=pipeline`.

The model is Qwen3-0.6B in bfloat16; a step is 8 microbatches of 2 or 4 rows with 4096 tokens, all gradients and AdamW
included. Every schedule and every head cost in layers (`stages.head_layer_cost`) gets a line with

- tokens per second of both GPUs, from the median step on the slower GPU, and the ratio to twice one GPU's. Steps are
  consecutive, as in a run: the host issues a step while the GPU computes the step before;
- the share of the step in which a rank's host issues the executor's work, in the fastest step that starts on an idle
  GPU: if it is nearly the whole step, the host is the limit;
- with --trace, from a trace of the executor's part of a step: how often a rank's host waited for the GPU, and the share
  of communication time that computation overlaps. A receive is posted early, so that its time includes the wait for the
  peer.

With --capture the passes of all stages are CUDA graphs. ROWS="1 2" and HEADS="6" choose among the lines.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

TINY = "--tiny" in sys.argv
if TINY:
    os.environ["TRITON_INTERPRET"] = "1"

import attrs  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

from benchmarks.gpu import clock  # noqa: E402
from benchmarks.gpu.timeline import Interval, union  # noqa: E402
from benchmarks.gpu.training import DENSE, SMALL, _whole_config  # noqa: E402
from drawloom.components.distributed.device import ComputeDevice  # noqa: E402
from drawloom.components.distributed.mesh import RankMesh  # noqa: E402
from drawloom.components.distributed.precision import DtypePolicy  # noqa: E402
from drawloom.components.distributed.processes import TorchProcesses  # noqa: E402
from drawloom.components.distributed.sum_over_shards import SumOverParameters  # noqa: E402
from drawloom.components.gradients.synchronize import Synchronize  # noqa: E402
from drawloom.components.kernels.auto import AutoKernels  # noqa: E402
from drawloom.components.loss.next_token import NextToken  # noqa: E402
from drawloom.components.model.qwen3.dense import Qwen3Dense  # noqa: E402
from drawloom.components.optim.adamw import AdamW  # noqa: E402
from drawloom.components.pipeline.captured import CapturedPasses  # noqa: E402
from drawloom.components.pipeline.executor import ProgramExecutor  # noqa: E402
from drawloom.components.ports.data import TokenBatch  # noqa: E402
from drawloom.components.ports.pipeline import create_step_state  # noqa: E402
from drawloom.components.ports.program import Program  # noqa: E402
from drawloom.components.ports.run import Step  # noqa: E402
from drawloom.components.stages.materialized import MaterializedStages  # noqa: E402
from support import pipelines  # noqa: E402

MICROBATCHES, LENGTH = (8, 12) if TINY else (8, 4096)
ROWS = (2,) if TINY else tuple(map(int, os.environ.get("ROWS", "2 4").split()))
LAYERS = 8 if TINY else 28
SCHEDULES = ("one_f_one_b", "zero_bubble_1p", "zero_bubble_v", "dual_pipe_v")
HEADS = (0, 2) if TINY else tuple(map(int, os.environ.get("HEADS", "0 6").split()))
"""The head has 151,936 x 1024 weights, a layer 15.7 million; its attention costs as much as 8.4 million more."""


def main() -> None:
    """Measure one GPU, then two, in separate processes, and print a table."""
    if "RANK" in os.environ:
        return _worker()
    if not TINY and torch.cuda.device_count() < 2:
        sys.exit("this needs two GPUs; --tiny tries it with two processes on a CPU")
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(__file__))
        environment = os.environ | {"BENCH_FOLDER": folder, "OMP_NUM_THREADS": "4"}
        for ranks in (1, 2):
            starter = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
            subprocess.run([sys.executable, *starter, program, *sys.argv[1:]], env=environment, check=True)


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
            ones = {rows: _measure_step(training_run(mesh, device, "one_f_one_b", 0, rows), device)[0] for rows in ROWS}
            base.write_text(json.dumps(ones))
            for rows, seconds in ones.items():
                print(f"one GPU, {rows} rows: {_tokens(rows) / seconds:,.0f} tokens/s", flush=True)
            return
        one: dict[str, float] = json.loads(base.read_text())
        for rows in ROWS:
            for name in [word for word in sys.argv[1:] if word in SCHEDULES] or SCHEDULES:
                for head in HEADS:
                    _line(mesh, device, name, head, rows, one[str(rows)])
    finally:
        processes.close()


def _line(mesh: RankMesh, device: ComputeDevice, name: str, head: int, rows: int, one: float) -> None:
    """Measure a schedule and print its line."""
    run = training_run(mesh, device, name, head, rows)
    times = mesh.world.gather_json(_measure_step(run, device))
    traces = mesh.world.gather_json(_trace(run.train, device) if "--trace" in sys.argv else {})
    if mesh.world.rank == 0:
        seconds = max(step for step, _ in times)
        text = f"{name:<17} rows {rows}  head {head}  {_tokens(rows) / seconds:>9,.0f} tokens/s"
        text += f"{one / seconds / 2:>7.1%} of two GPUs"
        for rank, trace in enumerate(traces):
            figures = ", ".join(f"{key} {value:.3g}" for key, value in trace.items())
            text += f"; rank {rank}: host busy {times[rank][1]:.1%} {figures}"
        print(text, flush=True)


@attrs.frozen
class Run:
    """A model ready for training: the whole step, the executor's part, and the program."""

    step: Callable[[], None]
    train: Callable[[], object]
    program: Program


def training_run(mesh: RankMesh, device: ComputeDevice, name: str, head: int, rows: int) -> Run:
    """Open a model on all pipeline ranks, with a schedule's name and the rows per microbatch."""
    dtype: Any = "float32" if TINY else "bfloat16"
    kernels = AutoKernels(device=device)
    kernels.open()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        config = DENSE | (SMALL | {"num_hidden_layers": LAYERS} if TINY else {})
        path.write_text(json.dumps(_whole_config(config)), "utf-8")
        model = Qwen3Dense(kernels=kernels, config=path)
        model.initialize_parameter = _initialise  # type: ignore[assignment,method-assign]
        precision = DtypePolicy(parameter=dtype, compute=dtype, gradient=dtype)
        schedule, loss = pipelines.schedule(name), NextToken()
        features: list[Any] = [CapturedPasses(device=device)] * ("--capture" in sys.argv)
        stages = MaterializedStages(
            model=model,
            loss=loss,
            schedule=schedule,
            mesh=mesh,
            device=device,
            precision=precision,
            job=pipelines.Job(),
        )
        stages.head_layer_cost, stages.features = head, features
        stages.open()
    parts: dict[str, Any] = {"stages": stages, "mesh": mesh}
    executor = ProgramExecutor(schedule=schedule, objective=loss, device=device, features=features, **parts)
    executor.open()
    reduction = Synchronize(parameters=stages, mesh=mesh, reduce=SumOverParameters(mesh=mesh))
    optimizer = AdamW(parameters=stages, mesh=mesh, lr=1e-5)
    optimizer.open()
    host = ComputeDevice(kind="cpu")  # a run's batches start on the CPU
    batches = [_batch(number, host, config["vocab_size"], rows) for number in range(MICROBATCHES)]

    def take_step() -> None:
        step = Step(1, 1, create_step_state(batches))
        executor.run_forward_and_backward(step.state)
        reduction.run_phase(step)
        optimizer.run_phase(step)

    return Run(
        take_step,
        lambda: executor.run_forward_and_backward(create_step_state(batches)),
        schedule.program(mesh.sizes.pipeline, MICROBATCHES),
    )


def _initialise(_name: str, parameter: Tensor, _seed: int, _part_of: Any = None) -> None:
    """Fill a parameter on its device, which is faster than a run's initial values."""
    parameter.fill_(1.0) if parameter.ndim == 1 else parameter.normal_(0.0, 0.02)


def _batch(number: int, device: ComputeDevice, vocabulary: int, rows: int, length: int = LENGTH) -> TokenBatch:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(vocabulary, (rows, length + 1), generator=generator).to(device.device)
    positions = torch.arange(length, device=device.device).expand(rows, length).contiguous()
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return TokenBatch(inputs, targets, positions, torch.zeros_like(positions), torch.ones_like(positions).float())


def _tokens(rows: int) -> int:
    return MICROBATCHES * rows * LENGTH


def _measure_step(run: Run, device: ComputeDevice) -> tuple[float, float]:
    """Return the step's seconds, and the share in which the host issues the executor's work."""
    seconds = clock.step_cost(run.step, device.device).seconds
    return seconds, clock.host_seconds(run.train, device.device) / seconds


def _trace(train: Callable[[], object], device: ComputeDevice) -> dict[str, float]:
    """Trace the executor on a GPU, and return the summary; empty on a CPU."""
    if device.device.type != "cuda":
        return {}
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as running:
        train()
        torch.cuda.synchronize()
    assert running.profiler is not None and running.profiler.kineto_results is not None
    return summary(running.profiler.kineto_results.events())


def summary(events: Any) -> dict[str, float]:
    """Return how often the host waited, without our final wait, and the share of messages that computation hides."""
    compute: list[Interval] = []
    messages: list[Interval] = []
    waits = -1
    for event in events:
        start, end = event.start_ns() / 1e6, (event.start_ns() + event.duration_ns()) / 1e6
        if "CUDA" in str(event.device_type()):
            (messages if "nccl" in event.name().lower() else compute).append((start, end))
        elif event.name() in ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize"):
            waits += 1
    busy, moving = list(union(compute)), list(union(messages))
    hidden = sum(max(0.0, min(e, f) - max(s, t)) for s, e in moving for t, f in busy if t < e and f > s)
    total = sum(end - start for start, end in moving)
    return {"waits": waits, "messages_ms": total, "hidden": hidden / total if total else 1.0}


if __name__ == "__main__":
    main()
