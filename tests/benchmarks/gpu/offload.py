"""
Full training steps with the optimizer's state on the GPU and in host memory: `make bench NAME=offload`.

The shape of Llama 3 8B in bfloat16, 16 microbatches of 4096 tokens a step: stochastic rounding with means in bfloat16
on the GPU and on the host, split master weights with means in float32 on the host, too large for a GPU of 80 GB;
means of 8 bits on the GPU; and the former with larger slots, which prefetch more while passes run.
A line has the speed, the seconds of a step, and its peak memory; the first step, which allocates, is left out. Words
such as microbatches=32 and steps=1 change the numbers of both.
"""

import gc
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu import clock
from benchmarks.gpu.meshes import LARGE, TINY, Case, our_step
from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.distributed.mesh import RankMesh
from drawloom.components.distributed.processes import TorchProcesses

STATES: tuple[dict[str, Any], ...] = (
    {"state_dtype": "bfloat16"},
    {"state_dtype": "bfloat16", "states": "host"},
    {"state_dtype": "float32", "states": "host", "split_master_weights": True},
    {"state_dtype": "uint8"},
    {"state_dtype": "float32", "states": "host", "split_master_weights": True, "slot_bytes": 2**32},
)
COUNTS = {"microbatches": 2 if TINY else 16, "steps": 1 if TINY else 3}
COUNTS |= {name: int(count) for name, mark, count in (word.partition("=") for word in sys.argv[1:]) if mark}


def main() -> None:
    """Measure the cases whose numbers, from 0, are on the command line, or all."""
    device = ComputeDevice(kind="cpu" if TINY else "cuda")
    device.open()
    processes = TorchProcesses(device=device)
    processes.open()
    numbers = [int(word) for word in sys.argv[1:] if word.isdigit()] or range(len(STATES))
    try:
        mesh = RankMesh(processes=processes, data_replicate=1)
        mesh.open()
        for number in numbers:
            _measure(
                Case(LARGE, 1, COUNTS["microbatches"], stochastic=STATES[number], recompute="selective"), mesh, device
            )
    finally:
        processes.close()


def _measure(case: Case, mesh: RankMesh, device: ComputeDevice) -> None:
    """Print a line about a case."""
    begin = time.perf_counter()
    step: Callable[[], None] = our_step(case, mesh, device)
    step()
    clock.wait(device.device)
    start_up = time.perf_counter() - begin
    seconds = []
    for _ in range(COUNTS["steps"]):
        begin = time.perf_counter()
        step()
        clock.wait(device.device)
        seconds.append(time.perf_counter() - begin)
    median = statistics.median(seconds)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.device.type == "cuda" else float("nan")
    numbers = f"{case.tokens / median:>9,.0f} tokens/s, {median:.2f} s, {peak:.1f} GiB, start {start_up:.0f} s"
    print(f"{case.name:<110}{numbers}", flush=True)
    del step
    gc.collect()
    if device.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
