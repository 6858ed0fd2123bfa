"""Peak host memory of each of four ranks while a model of 2 GB starts on a mesh: read from a folder, or drawn."""

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
from drawloom.components.export.hf_writer import write_folder
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
    """The model's sizes: 2 GB of float32."""
    return Qwen3Dense(kernels=cpu_kernels(), **SIZES)


def write(folder: Path) -> int:
    """The folder, all numbers different from zero, and the bytes of its tensors."""
    built = model()
    with torch.device("meta"):
        module = built.build(LayerRange(0, built.num_hidden_layers, embedding=True, head=True))
    module.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(0.02)
    write_folder(folder, built, OneStage(module), max_shard=2**28)
    return sum(parameter.nbytes for parameter in module.parameters())


def measure(folder: Path, sizes: Mapping[str, int]) -> None:
    """Start in this process, from the folder and at random, and print on rank 0 what ranks took at most."""
    device = ComputeDevice(kind="cpu")
    device.open()
    processes = TorchProcesses(device=device)
    processes.open()
    mesh = RankMesh(processes=processes, **{"data_replicate": 1, **sizes})
    mesh.open()
    import torch.distributed.fsdp  # noqa: F401 - it belongs to what is imported, not to the model

    for what, weights in (("read", folder), ("drawn", None)):
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
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
        taken = {"peak": status("VmHWM") - before, "seconds": time.perf_counter() - began}
        every = mesh.world.gather_json(taken)
        if mesh.world.rank == 0:
            worst = {key: max(each[key] for each in every) for key in taken}
            print(json.dumps({"what": what, **worst}), flush=True)
        del stages
    processes.close()


def main() -> None:
    """Print, for each mesh, the largest peak as a part of the model's size, and the seconds."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        size = write(folder)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        # What is freed goes back to the system: the peak is of memory in use, not of what glibc keeps for later.
        environment["MALLOC_MMAP_THRESHOLD_"] = str(2**16)
        for sizes in MESHES:
            words = [str(folder), json.dumps(sizes)]
            starter = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--no-python"]
            command = [*starter, sys.executable, __file__, *words]
            found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
            for line in filter(None, found.splitlines()):
                each = json.loads(line)
                mesh = " ".join(f"{name}={ranks}" for name, ranks in sizes.items())
                peak = f"peak {each['peak'] / size:.2f} of {size / 1e9:.2f} GB on each rank"
                print(f"{mesh:<24}{each['what']:<7}{peak}, {each['seconds']:.1f} s", flush=True)


if __name__ == "__main__":
    measure(Path(sys.argv[1]), json.loads(sys.argv[2]))
