"""Peak host memory per rank while a 2 GB model starts on four ranks: read from a folder, or initialized."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.model_state_memory import status
from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.distributed.mesh import RankMesh
from drawloom.components.distributed.precision import DtypePolicy
from drawloom.components.distributed.processes import TorchProcesses
from drawloom.components.export.hf_writer import write_hugging_face_folder
from drawloom.components.loss.next_token import NextToken
from drawloom.components.model.qwen3.dense import Qwen3Dense
from drawloom.components.ports.model import LayerRange
from drawloom.components.stages.materialized import MaterializedStages
from support import pipelines
from support.adapted import OneStage
from support.qwen3 import cpu_kernels

RANKS = 4
SIZES: dict[str, Any] = {
    "num_hidden_layers": 34,
    "vocab_size": 32000,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 3584,
    "tie_word_embeddings": True,
}
MESHES: list[Mapping[str, int]] = [{"data_shard": 4}, {"tensor": 4}, {"tensor": 2, "data_shard": 2}, {"pipeline": 4}]


def model() -> Qwen3Dense:
    """Return a model with 2 GB of float32 parameters."""
    return Qwen3Dense(kernels=cpu_kernels(), **SIZES)


def write(folder: Path) -> int:
    """Write the model with nonzero values to a folder, and return the size of its tensors in bytes."""
    built = model()
    with torch.device("meta"):
        module = built.build(LayerRange.of_whole_model(built.num_hidden_layers))
    module.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(0.02)
    write_hugging_face_folder(folder, built, OneStage(module), max_shard=2**28)
    return sum(parameter.nbytes for parameter in module.parameters())


def measure(folder: Path, sizes: Mapping[str, int]) -> None:
    """Start from the folder and from random values, and print the largest peak and duration of all ranks on rank 0."""
    device = ComputeDevice(kind="cpu")
    device.open()
    processes = TorchProcesses(device=device)
    processes.open()
    mesh = RankMesh(processes=processes, **{"data_replicate": 1, **sizes})
    mesh.open()
    import torch.distributed.fsdp  # noqa: F401 - imported early, so that its memory does not count

    for start, weights in (("read", folder), ("drawn", None)):
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        before, began = status("VmRSS"), time.perf_counter()
        stages = MaterializedStages(
            model=model(),
            loss=NextToken(),
            schedule=pipelines.schedule("one_f_one_b"),
            mesh=mesh,
            device=device,
            precision=DtypePolicy(),
            job=pipelines.Job(),
            weights=weights,
        )
        stages.open()
        usage = {"peak": status("VmHWM") - before, "seconds": time.perf_counter() - began}
        rank_usages = mesh.world.gather_json(usage)
        if mesh.world.rank == 0:
            worst = {key: max(rank_usage[key] for rank_usage in rank_usages) for key in usage}
            print(json.dumps({"start": start, **worst}), flush=True)
        del stages
    processes.close()


def main() -> None:
    """Print every mesh's largest peak as a fraction of the model's size, and its seconds."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        size = write(folder)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        # glibc returns freed memory at once, so that the peak counts only memory in use.
        environment["MALLOC_MMAP_THRESHOLD_"] = str(2**16)
        for sizes in MESHES:
            words = [str(folder), json.dumps(sizes)]
            starter = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--no-python"]
            command = [*starter, sys.executable, __file__, *words]
            output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
            for line in filter(None, output.splitlines()):
                figures = json.loads(line)
                mesh = " ".join(f"{name}={ranks}" for name, ranks in sizes.items())
                peak = f"peak {figures['peak'] / size:.2f} of {size / 1e9:.2f} GB on each rank"
                print(f"{mesh:<24}{figures['start']:<7}{peak}, {figures['seconds']:.1f} s", flush=True)


if __name__ == "__main__":
    measure(Path(sys.argv[1]), json.loads(sys.argv[2]))
