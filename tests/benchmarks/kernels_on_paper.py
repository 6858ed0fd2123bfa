"""Registers and shared memory of every Triton kernel, compiled ahead of time for Hopper without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
COLUMNS = ("registers", "spilled", "shared", "warps", "instructions", "wide")
"""Registers and spilled bytes per thread; shared bytes and warps per program; instructions; 16-byte accesses."""


def main() -> None:
    """Print a line per kernel and operation."""
    program = str(ROOT / "tests" / "support" / "ahead_of_time.py")
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}"}
    environment.pop("TRITON_INTERPRET", None)
    kernels_by_operation = json.loads(subprocess.check_output([sys.executable, program, "report"], env=environment))
    print(f"{'':<64}" + "".join(f"{column:>13}" for column in COLUMNS))
    for name, kernels in kernels_by_operation.items():
        for kernel in kernels:
            print(f"{name + ', ' + kernel['kernel']:<64}" + "".join(f"{kernel[column]:>13,}" for column in COLUMNS))
