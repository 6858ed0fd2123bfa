"""Peak host memory while a 2 GB model is loaded from 16 files, compared with the module's own size."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from drawloom.components.weights.mapper import identity
from support.tensor_sources import InMemoryTensors, write_safetensors
from support.weight_folders import fill_module_from_folder

FILES = 16
PER_FILE = 8
SIDE = 2048  # a matrix of bfloat16 has 16 MB with twice as many rows
LIMIT = 1.3


def names() -> list[str]:
    """Return the names of 128 parameters with 16 MB each."""
    return [f"layers.{number}.weight" for number in range(FILES * PER_FILE)]


def module() -> nn.Module:
    """Return the model on the meta device."""
    layers = nn.ModuleList(nn.Linear(SIDE, 2 * SIDE, bias=False, dtype=torch.bfloat16, device="meta") for _ in names())
    model = nn.Module()
    model.layers = layers
    return model


def write(folder: Path) -> None:
    """Write the checkpoint folder. All values are nonzero, so that the kernel does not share zero pages."""
    tensor = torch.full((2 * SIDE, SIDE), 1.5, dtype=torch.bfloat16)
    source = InMemoryTensors(dict.fromkeys(names(), tensor))
    write_safetensors(folder, source, identity(*names()), max_shard=PER_FILE * tensor.nbytes)


def status(field: str) -> int:
    """Return a size from this process's status file, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def measure(folder: Path) -> None:
    """Load the folder in this process, and print its peak memory and seconds."""
    model, mapper = module(), identity(*names())
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before, began = status("VmRSS"), time.perf_counter()
    fill_module_from_folder(folder, model, mapper)
    size = sum(parameter.nbytes for parameter in model.parameters())
    seconds = time.perf_counter() - began
    print(json.dumps({"size": size, "peak": status("VmHWM") - before, "seconds": seconds}))


def main() -> None:
    """Print the peak as a multiple of the module's size, and fail above the limit."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, __file__, folder]
        figures = json.loads(
            subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        )
    ratio = figures["peak"] / figures["size"]
    speed = figures["size"] / figures["seconds"] / 1e9
    print(f"{figures['size'] / 1e9:.2f} GB in {FILES} files: peak {ratio:.2f} of the module's size, {speed:.1f} GB/s")
    if ratio > LIMIT:
        raise SystemExit(f"more than {LIMIT}")


if __name__ == "__main__":
    measure(Path(sys.argv[1]))
