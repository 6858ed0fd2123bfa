"""
GPU time of a training step by kind of operation: `make bench NAME=breakdown`; RANKS=2 for meshes of two GPUs.

The models are Qwen3-0.6B, the shape of Llama 3 8B and a billion parameters with 64 experts, trained as in `meshes.py`.
The first line has tokens per second and GPU, and the step's and the host's milliseconds without tracing. Then follow,
for consecutive traced steps, the GPU's computing and idle time, the part of it in which only NCCL runs, the launches,
the sums of operations by kind (NCCL runs concurrently), the longest operations and the longest gaps.
"""

import gc
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu import clock
from benchmarks.gpu.meshes import EXPERTS, LARGE, LENGTH, SMALL_MODEL, TINY, Case, our_step
from benchmarks.gpu.timeline import Interval, iterate_gpu_operations, union
from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.distributed.mesh import RankMesh
from drawloom.components.distributed.processes import TorchProcesses
from drawloom.components.planning.floor import NAMES

CASES = [
    *(Case(LARGE, 2, 1), Case(EXPERTS, 4, 1)),
    *(Case(SMALL_MODEL, *shape) for shape in ((4, 1), (4, 4), (8, 2), (1, 16))),
    *(Case(*shape, capture=True) for shape in ((EXPERTS, 4, 1), (SMALL_MODEL, 1, 16))),
    *(Case(SMALL_MODEL, rows, 1, length=length) for rows, length in ((4, 2 * LENGTH), (1, 8 * LENGTH))),
]
LONGEST = int(os.environ.get("LONGEST", "8"))
TRACED = 3
"""Number of traced steps; figures are their means."""


def list_cases(ranks: int) -> list[Case]:
    """Return the cases of one GPU, or a case for each kind of mesh."""
    if ranks == 1:
        return CASES
    shards = {"data_shard": ranks}
    experts = Case(EXPERTS, 4, 1, {**shards, "expert": ranks}, reshard=False, dispatcher="symmetric")
    return [
        *(Case(SMALL_MODEL, 4, 1, shards, reshard=reshard) for reshard in (True, False)),
        Case(SMALL_MODEL, 4, 1, {"data_replicate": ranks}),
        Case(SMALL_MODEL, 1, 1, {"context": ranks}, length=8 * LENGTH),
        experts,
        Case(LARGE, 2 * ranks, 1, {"tensor": ranks}),
        *(Case(LARGE, 2, 1, shards, reshard=reshard) for reshard in (True, False)),
    ]


KINDS = {
    "NCCL": ("nccl",),
    "casts": (
        "_quantize_kernel",
        "_scale_and_transpose_kernel",
        "_combine_scales_and_transpose_kernel",
        "_column_scale",
        "_largest",
        "_swiglu",
        "_cast_experts",
    ),
    **NAMES,
    "optimizer, norm": ("multi_tensor_apply",),
    "copies": ("memcpy", "memset"),
}
"""Kind -> substrings of GPU operation names; the first match counts."""


def main() -> None:
    """Start the processes; rank 0 prints."""
    if "RANK" in os.environ:
        return _worker()
    starter = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        os.environ.get("RANKS", "1"),
    ]
    subprocess.run([*starter, __file__, *sys.argv[1:]], env=os.environ | {"OMP_NUM_THREADS": "4"}, check=True)


def _worker() -> None:
    device = ComputeDevice(kind="cpu" if TINY else "cuda")
    device.open()
    processes = TorchProcesses(device=device)
    processes.open()
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    try:
        for case in list_cases(processes.world_size):
            if not words or any(word in case.name for word in words):
                _print_lines(case, processes, device)
    finally:
        processes.close()


def _print_lines(case: Case, processes: TorchProcesses, device: ComputeDevice) -> None:
    mesh = RankMesh(processes=processes, **{"data_replicate": 1, **case.sizes})
    mesh.open()
    step = our_step(case, mesh, device)
    seconds = clock.step_cost(step, device.device).seconds
    host = clock.host_seconds(step, device.device)
    operations = list(traced_operations(step)) if device.device.type == "cuda" else []
    if processes.rank == 0:
        speed = f"{case.tokens / seconds:>9,.0f} tokens/s a GPU, {seconds * 1e3:.1f} ms, host {host * 1e3:.1f}"
        print(f"{case.name:<60}{speed}", flush=True)
        for line in describe_operations(operations) if operations else ():
            print(f"    {line}", flush=True)
    del step
    gc.collect()
    if device.device.type == "cuda":
        torch.cuda.empty_cache()


def traced_operations(step: Callable[[], None]) -> Iterator[tuple[str, Interval]]:
    """Yield the name and interval in ms of every GPU operation in the traced steps."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as running:
        for _ in range(TRACED):
            step()
        torch.cuda.synchronize()
    yield from iterate_gpu_operations(running)


def describe_operations(operations: list[tuple[str, Interval]]) -> Iterator[str]:
    kinds, names = Counter[str](), Counter[str]()
    for name, (start, end) in operations:
        kinds[kind_of(name)] += (end - start) / TRACED  # type: ignore[assignment]
        names[name[:70]] += (end - start) / TRACED  # type: ignore[assignment]
    busy = list(union([span for name, span in operations if kind_of(name) != "NCCL"]))
    computing, whole = sum(end - start for start, end in busy) / TRACED, (busy[-1][1] - busy[0][0]) / TRACED
    occupied = sum(end - start for start, end in union([span for _, span in operations])) / TRACED
    idle = f"idle {whole - computing:.1f}, of it {occupied - computing:.1f} in NCCL"
    launches = f"{len(operations) / TRACED:.0f} launches"
    yield f"computing {computing:.1f}, {idle}; {launches}; " + _format(kinds.most_common())
    yield "longest: " + _format(names.most_common(LONGEST))
    gaps = [(after[0] - before[1], before[1] - busy[0][0]) for before, after in pairwise(busy)]
    yield "gaps: " + ", ".join(f"{gap:.2f} at {at:.0f}" for gap, at in sorted(gaps, reverse=True)[:4])


def kind_of(name: str) -> str:
    return next((kind for kind, parts in KINDS.items() if any(part in name.lower() for part in parts)), "other")


def _format(counts: list[tuple[str, Any]]) -> str:
    return ", ".join(f"{name} {ms:.1f}" for name, ms in counts)


if __name__ == "__main__":
    main()
