"""Peak host memory while a model of 2 GB in 16 files is loaded, beside what the module itself needs."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from drawloom.components.storage.tensor_source import InMemory
from drawloom.components.weights.load import load_folder
from drawloom.components.weights.mapper_ops import identity
from drawloom.components.weights.save import write_safetensors

FILES = 16
PER_FILE = 8
SIDE = 2048  # a matrix of bfloat16 has 16 MB with twice as many rows
LIMIT = 1.3


def names() -> list[str]:
    """The parameters: 128 of 16 MB."""
    return [f"layers.{number}.weight" for number in range(FILES * PER_FILE)]


def module() -> nn.Module:
    """The model, on the meta device."""
    layers = nn.ModuleList(nn.Linear(SIDE, 2 * SIDE, bias=False, dtype=torch.bfloat16, device="meta") for _ in names())
    made = nn.Module()
    made.layers = layers
    return made


def write(folder: Path) -> None:
    """The folder, all numbers different from zero, so that no page of memory is shared."""
    tensor = torch.full((2 * SIDE, SIDE), 1.5, dtype=torch.bfloat16)
    source = InMemory(dict.fromkeys(names(), tensor))
    write_safetensors(folder, source, identity(*names()), max_shard=PER_FILE * tensor.nbytes)


def status(what: str) -> int:
    """A line of the process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))


def measure(folder: Path) -> None:
    """Load in this process, and print what it took."""
    model, mapper = module(), identity(*names())
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before, began = status("VmRSS"), time.perf_counter()
    load_folder(folder, model, mapper)
    size = sum(parameter.nbytes for parameter in model.parameters())
    seconds = time.perf_counter() - began
    print(json.dumps({"size": size, "peak": status("VmHWM") - before, "seconds": seconds}))


def main() -> None:
    """Print the peak as a multiple of the module's size; an error if it is above the limit."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, __file__, folder]
        found = json.loads(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    ratio = found["peak"] / found["size"]
    speed = found["size"] / found["seconds"] / 1e9
    print(f"{found['size'] / 1e9:.2f} GB in {FILES} files: peak {ratio:.2f} of the module's size, {speed:.1f} GB/s")
    if ratio > LIMIT:
        raise SystemExit(f"more than {LIMIT}")


if __name__ == "__main__":
    measure(Path(sys.argv[1]))
