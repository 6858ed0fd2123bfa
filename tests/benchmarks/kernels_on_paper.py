"""What each Triton kernel takes of a Hopper GPU, compiled ahead of time: no GPU is needed."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
COLUMNS = ("registers", "spilled", "shared", "warps", "instructions", "wide")
"""A thread's registers and spilled bytes, a program's shared bytes and warps, instructions, and 16-byte accesses."""


def main() -> None:
    """Print a line for each kernel of each operation."""
    program = str(ROOT / "tests" / "support" / "ahead_of_time.py")
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}"}
    environment.pop("TRITON_INTERPRET", None)
    found = json.loads(subprocess.check_output([sys.executable, program, "report"], env=environment))
    print(f"{'':<64}" + "".join(f"{column:>13}" for column in COLUMNS))
    for name, kernels in found.items():
        for kernel in kernels:
            print(f"{name + ', ' + kernel['kernel']:<64}" + "".join(f"{kernel[column]:>13,}" for column in COLUMNS))
