"""
Time for a model to start on one GPU, or on the CPU if there is none: `make bench NAME=start`.

A model with the shape of Llama 3 8B in bfloat16 is initialized at random, written to a local folder (FOLDER=/path, 17
GB; default: a temporary folder), and read twice: after its files were dropped from the page cache, and from the cache.
A line reports the seconds of `stages.open()`, GB per second, and the peak GiB on the device and on the host beyond the
memory in use before. `--small` uses a tenth of the layers and of the vocabulary; `--profile` prints the host's profile.
"""

import cProfile
import gc
import os
import pstats
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.meshes import LLAMA
from benchmarks.model_state_memory import status
from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.distributed.mesh import RankMesh
from drawloom.components.distributed.precision import DtypePolicy
from drawloom.components.distributed.processes import TorchProcesses
from drawloom.components.export.hf_writer import write_hugging_face_folder
from drawloom.components.kernels.auto import AutoKernels
from drawloom.components.loss.next_token import NextToken
from drawloom.components.model.qwen3.dense import Qwen3Dense
from drawloom.components.stages.materialized import MaterializedStages
from support import pipelines

SMALL = "--small" in sys.argv
GPU = torch.cuda.is_available()
SIZES: dict[str, Any] = {key: value for key, value in LLAMA.items() if key != "model_type"}
if SMALL:
    SIZES |= {"num_hidden_layers": 3, "vocab_size": 12800}


def main() -> None:
    """Initialize, write, and read from the disk and from the cache."""
    device = ComputeDevice(kind="cuda" if GPU else "cpu")
    device.open()
    processes = TorchProcesses(device=device)
    processes.open()
    mesh = RankMesh(processes=processes)
    mesh.open()
    kernels = AutoKernels(device=device)
    kernels.open()
    model = Qwen3Dense(kernels=kernels, **SIZES)
    try:
        with tempfile.TemporaryDirectory(dir=os.environ.get("FOLDER")) as temporary:
            folder = Path(temporary) / "model"
            stages = time_start("drawn", lambda: open_stages(model, mesh, device, None))
            write_hugging_face_folder(folder, model, stages)
            del stages
            drop_pages(folder)
            time_start("read from the disk", lambda: open_stages(model, mesh, device, folder))
            time_start("read from the cache", lambda: open_stages(model, mesh, device, folder))
    finally:
        processes.close()


def open_stages(model: Qwen3Dense, mesh: RankMesh, device: ComputeDevice, weights: Path | None) -> MaterializedStages:
    """Open a run's stages."""
    stages = MaterializedStages(
        model=model,
        loss=NextToken(),
        schedule=pipelines.schedule("one_f_one_b"),
        mesh=mesh,
        device=device,
        precision=DtypePolicy(parameter="bfloat16"),
        job=pipelines.Job(),
        weights=weights,
    )
    stages.open()
    if GPU:
        torch.cuda.synchronize()
    return stages


def time_start(name: str, start: Callable[[], MaterializedStages]) -> MaterializedStages:
    """Time a start, and print its duration and memory."""
    gc.collect()
    if GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if GPU else 0
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    host, profile = status("VmRSS"), cProfile.Profile()
    begun = time.perf_counter()
    stages = profile.runcall(start) if "--profile" in sys.argv else start()
    seconds = time.perf_counter() - begun
    size = sum(parameter.nbytes for _, parameter in stages.named_parameters())
    peaks = {
        "device": torch.cuda.max_memory_allocated() - before if GPU else 0,
        "host": status("VmHWM") - host,
    }
    memory = ", ".join(f"{peak / 2**30:.1f} GiB of the {where}" for where, peak in peaks.items())
    print(f"{name:<22}{seconds:7.1f} s, {size / 1e9 / seconds:5.1f} GB/s of {size / 1e9:.1f} GB; {memory}", flush=True)
    if "--profile" in sys.argv:
        pstats.Stats(profile).sort_stats("tottime").print_stats(12)
    return stages


def drop_pages(folder: Path) -> None:
    """Drop the files from the page cache, so that they are read from the disk."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
