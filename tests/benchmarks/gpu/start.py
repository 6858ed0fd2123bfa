"""
How long a model takes to start on one GPU, or on the CPU without one: `make bench-start-gpu`.

The shape of Llama 3 8B in bfloat16 is drawn at random, written to a folder on a local disk (FOLDER=/path, 17 GB; a
temporary one otherwise) and read again twice: with the pages of its files dropped from the system's cache, and with
them in it. Each line says the seconds of `stages.open()`, GB a second, and the most GiB of the device and of the host
above what was in use before. `--small` takes a tenth of the layers and of the vocabulary, `--profile` prints where the
host's time goes.
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
from drawloom.components.export.hf_writer import write_folder
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
    """Draw, write, and read from the disk and from the cache."""
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
        with tempfile.TemporaryDirectory(dir=os.environ.get("FOLDER")) as place:
            folder = Path(place) / "model"
            stages = timed("drawn", lambda: started(model, mesh, device, None))
            write_folder(folder, model, stages)
            del stages
            drop_pages(folder)
            timed("read from the disk", lambda: started(model, mesh, device, folder))
            timed("read from the cache", lambda: started(model, mesh, device, folder))
    finally:
        processes.close()


def started(model: Qwen3Dense, mesh: RankMesh, device: ComputeDevice, weights: Path | None) -> MaterializedStages:
    """The stages of a run, open."""
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


def timed(what: str, start: Callable[[], MaterializedStages]) -> MaterializedStages:
    """Print how long a start takes, and its memory."""
    gc.collect()
    if GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if GPU else 0
    Path("/proc/self/clear_refs").write_text("5")  # the peak of the host starts again from here
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
    print(f"{what:<22}{seconds:7.1f} s, {size / 1e9 / seconds:5.1f} GB/s of {size / 1e9:.1f} GB; {memory}", flush=True)
    if "--profile" in sys.argv:
        pstats.Stats(profile).sort_stats("tottime").print_stats(12)
    return stages


def drop_pages(folder: Path) -> None:
    """Let the system forget what it has of the files, so that they are read from the disk."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
