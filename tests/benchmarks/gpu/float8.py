"""
Training steps with products in bfloat16 and in float8, in one run on one GPU: `make bench NAME=float8`.

The shape of Llama 3 8B, Qwen3-1.7B, Qwen3-0.6B and a billion parameters with 64 experts, with parameters in bfloat16;
the smaller ones also with passes as CUDA graphs, since float8 has three times as many operations for the host to issue.
Lines are as in `breakdown.py`, with peak memory; a model's last line is the ratio of both speeds.
"""

import gc
import sys
from collections.abc import Callable

import attrs
import torch

from benchmarks.gpu import clock
from benchmarks.gpu.breakdown import describe_operations, traced_operations
from benchmarks.gpu.meshes import EXPERTS, LARGE, LENGTH, MEDIUM_MODEL, SMALL_MODEL, TINY, Case, our_step
from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.distributed.mesh import RankMesh
from drawloom.components.distributed.processes import TorchProcesses

CASES = (
    *(
        Case(LARGE, 2, 1),
        Case(LARGE, 4, 1),
        Case(LARGE, 1, 1, length=2 * LENGTH),
        Case(MEDIUM_MODEL, 4, 1),
        Case(SMALL_MODEL, 4, 1),
        Case(EXPERTS, 4, 1),
    ),
    *(Case(model, 4, 1, capture=True) for model in (MEDIUM_MODEL, SMALL_MODEL, EXPERTS)),
)
FORMATS = (False, True)
"""Whether products are in float8."""


def main() -> None:
    """Measure the models whose names contain a word of the command line, or all."""
    gc.disable()  # as in runs, where `phases.garbage_collection` decides when to collect
    device = ComputeDevice(kind="cpu" if TINY else "cuda")
    device.open()
    processes = TorchProcesses(device=device)
    processes.open()
    mesh = RankMesh(processes=processes, data_replicate=1)
    mesh.open()
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    try:
        for case in CASES:
            if not words or any(word in case.name for word in words):
                speeds = [measure_case(attrs.evolve(case, float8=float8), mesh, device) for float8 in FORMATS]
                print(f"{case.name:<60}float8 is {speeds[1] / speeds[0]:.3f} times as fast", flush=True)
    finally:
        processes.close()


def measure_case(case: Case, mesh: RankMesh, device: ComputeDevice) -> float:
    """Print lines about a case, and return its tokens per second."""
    step: Callable[[], None] = our_step(case, mesh, device)
    cost = clock.step_cost(step, device.device)
    speed = case.tokens / cost.seconds
    print(f"{case.name:<75}{speed:>9,.0f} tokens/s, {cost.seconds * 1e3:.1f} ms, {cost.allocated:.1f} GiB", flush=True)
    if device.device.type == "cuda":
        for line in describe_operations(list(traced_operations(step))):
            print(f"    {line}", flush=True)
    del step
    gc.collect()
    if device.device.type == "cuda":
        torch.cuda.empty_cache()
    return speed


if __name__ == "__main__":
    main()
