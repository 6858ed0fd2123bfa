"""
Training steps by this tree and an earlier one, case by case: `make bench NAME=trees ONLY=/path/to/earlier/tree`.

The cases show whether a redesign costs speed: Qwen3-0.6B and Llama 3 8B's shape in bfloat16 and float8, experts,
and LoRA. Both trees run their own `meshes.py` in processes of their own, one after the other, twice.
A line has tokens per second, the host's milliseconds to issue a step, and peak memory, for each process.
"""

import gc
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
ROUNDS = 2
CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("SMALL_MODEL", 4, {}),
    ("SMALL_MODEL", 4, {"float8": True}),
    ("SMALL_MODEL", 4, {"float8": True, "capture": True}),
    ("EXPERTS", 4, {}),
    ("EXPERTS", 4, {"capture": True}),
    ("LARGE", 2, {}),
    ("LARGE", 2, {"float8": True}),
    ("LARGE", 2, {"lora": True}),
]
"""Model's name in `meshes.py`, rows, and a case's other options."""


def main() -> None:
    """Start a process by tree and round, and print their figures side by side."""
    trees = [Path(word).resolve() for word in sys.argv[1:2]] + [ROOT]
    figures: dict[str, dict[Path, list[list[float]]]] = {}
    for _ in range(ROUNDS):
        for tree in trees:
            environment = os.environ | {"PYTHONPATH": f"{tree}/src:{tree}/tests:{os.environ.get('PYTHONPATH', '')}"}
            command = [sys.executable, __file__, "--measure", *sys.argv[2:]]
            output = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, check=False).stdout
            for line in output.splitlines():
                name, *numbers = line.split("\t")
                figures.setdefault(name, {}).setdefault(tree, []).append([float(number) for number in numbers])
    for name, figures_by_tree in figures.items():
        print(name)
        for tree, rounds in figures_by_tree.items():
            texts = ", ".join(f"{speed:,.0f} tokens/s ({host:.0f} ms, {gib:.1f} GiB)" for speed, host, gib in rounds)
            print(f"    {'this tree' if tree == ROOT else 'before':<12}{texts}")
        speeds = [statistics.mean(speed for speed, *_ in rounds) for rounds in figures_by_tree.values()]
        print(f"    ratio       {speeds[-1] / speeds[0]:.3f}", flush=True)


def measure() -> None:
    """Print a line per case for the tree on PYTHONPATH: name, tokens per second, host's ms, and peak GiB."""
    import attrs
    import torch

    from benchmarks.gpu import clock, meshes
    from drawloom.components.distributed.device import ComputeDevice
    from drawloom.components.distributed.mesh import RankMesh
    from drawloom.components.distributed.processes import TorchProcesses

    gc.disable()
    device = ComputeDevice(kind="cpu" if meshes.TINY else "cuda")
    device.open()
    processes = TorchProcesses(device=device)
    processes.open()
    mesh = RankMesh(processes=processes, data_replicate=1)
    mesh.open()
    has_switch = "float8" in {field.name for field in attrs.fields(meshes.Case)}
    for model, rows, options in CASES:
        name = ", ".join([getattr(meshes, model), *options])
        if options.get("float8") and not has_switch:
            options = {**options, "linear": "float8"}
            del options["float8"]
        case = meshes.Case(getattr(meshes, model), rows, 1, **options)
        step = meshes.our_step(case, mesh, device)
        cost = clock.step_cost(step, device.device)
        host = clock.host_seconds(step, device.device)
        print(f"{name}\t{case.tokens / cost.seconds}\t{host * 1e3}\t{cost.allocated}", flush=True)
        del step
        gc.collect()
        if device.device.type == "cuda":
            torch.cuda.empty_cache()
    processes.close()


if __name__ == "__main__":
    measure() if "--measure" in sys.argv else main()
