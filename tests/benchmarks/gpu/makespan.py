"""
Measured and simulated step time of a two-GPU pipeline, for every schedule: `make bench NAME=makespan`.

The model is Qwen3-0.6B in bfloat16; a step is 8 microbatches of 4 rows (ROWS) of 4096 tokens, forward and backward
passes alone. A schedule's line reports, in milliseconds,

- `run`: the median untraced step, from a common start until both GPUs are done;
- `traced`: a traced step on the GPUs, from the first action's start to the last action's end;
- `simulated`: the simulated step, with every stage's median pass times from the trace.

The last two columns are the simulation's errors.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, schedule

from benchmarks.gpu.clock import wait
from benchmarks.gpu.pipeline import TINY, Run, training_run
from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.distributed.mesh import RankMesh
from drawloom.components.distributed.processes import TorchProcesses
from drawloom.components.pipeline.program.lowering import merge_split_backwards
from drawloom.components.pipeline.program.timing import compute_timing as simulated
from drawloom.components.planning.cost_sources import TracedStep, read_traced_step
from support.pipelines import TRAINING

ROWS = 2 if TINY else int(os.environ.get("ROWS", "4"))
HEAD = 2 if TINY else 6
STEPS = 2 if TINY else 5
SCHEDULES = [name for name in TRAINING if name != "circular"]


def main() -> None:
    """Start two processes, which print a line per schedule."""
    if "RANK" in os.environ:
        return _worker()
    with tempfile.TemporaryDirectory() as folder:
        starter = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        environment = os.environ | {"BENCH_FOLDER": folder, "OMP_NUM_THREADS": "4"}
        subprocess.run([*starter, __file__, *sys.argv[1:]], env=environment, check=True)


def _worker() -> None:
    device = ComputeDevice(kind="cpu" if TINY else "cuda")
    device.open()
    processes = TorchProcesses(device=device)
    processes.open()
    try:
        mesh = RankMesh(processes=processes, pipeline=2, data_replicate=1)
        mesh.open()
        if mesh.world.rank == 0:
            print(f"{'schedule':20}{'run':>9}{'traced':>9}{'simulated':>11}{'of run':>9}{'of trace':>10}", flush=True)
        for name in [word for word in sys.argv[1:] if word in SCHEDULES] or SCHEDULES:
            run = training_run(mesh, device, name, HEAD, ROWS)
            seconds = _step_seconds(run, mesh, device)
            step = _trace_step(run, mesh, device, Path(os.environ["BENCH_FOLDER"]) / name)
            if step is not None:
                traced, predicted = (
                    step.simulation.makespan,
                    simulated(step.program, step.compute_cost_table()).makespan,
                )
                times = f"{seconds * 1e3:9.1f}{traced * 1e3:9.1f}{predicted * 1e3:11.1f}"
                print(f"{name:20}{times}{predicted / seconds - 1:9.1%}{predicted / traced - 1:10.1%}", flush=True)
            del run
    finally:
        processes.close()


def _step_seconds(run: Run, mesh: RankMesh, device: ComputeDevice) -> float:
    """Return the median seconds of several steps."""
    times: list[float] = []
    for _ in range(2 + STEPS):
        wait(device.device)
        mesh.world.gather_json(None)
        start = time.perf_counter()
        run.train()
        wait(device.device)
        times.append(max(mesh.world.gather_json(time.perf_counter() - start)))
    return statistics.median(times[2:])


def _trace_step(run: Run, mesh: RankMesh, device: ComputeDevice, folder: Path) -> TracedStep | None:
    """Return both ranks' traced step on rank 0, else None. The profiler starts during the step before."""
    (folder / "traces").mkdir(parents=True, exist_ok=True)
    path = str(folder / "traces" / f"steps-1-1-rank-{mesh.world.rank}.json.gz")
    kinds = [ProfilerActivity.CPU, *([] if device.device.type == "cpu" else [ProfilerActivity.CUDA])]
    second = schedule(wait=0, warmup=1, active=1, repeat=1)
    with profile(
        activities=kinds, schedule=second, on_trace_ready=lambda done: done.export_chrome_trace(path)
    ) as running:
        for _ in range(2):
            wait(device.device)
            mesh.world.gather_json(None)
            run.train()
            wait(device.device)
            running.step()
    mesh.world.gather_json(None)
    # Reading takes longer than the steps, so that only rank 0 reads.
    return read_traced_step(folder, merge_split_backwards(run.program)) if mesh.world.rank == 0 else None


if __name__ == "__main__":
    main()
