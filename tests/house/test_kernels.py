"""
Triton's kernels as the compiler for GPUs sees them, on any machine.

The interpreter, in which they are tested, is lenient about types; and it compiles nothing, so it can't tell how often a
GPU would have to wait for the compiler.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

MOST = 5
"""Varieties: sizes of 1, sizes that 16 divides, and the smallest ones, which take smaller tiles."""


def found(what: str) -> Any:
    """What a process finds out that has Triton's compiler, and not its interpreter."""
    program = str(ROOT / "tests" / "support" / "ahead_of_time.py")
    environment = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    return json.loads(subprocess.check_output([sys.executable, program, what], env=environment))


def test_types_of_all_kernels_are_right() -> None:
    """Every kernel, in every direction and for the dtypes of models, gets past the compiler's front."""
    assert found("failures") == {}


def test_sizes_do_not_bring_new_kernels() -> None:
    """A hundred random sizes take a few compiled kernels and no more: training does not stop to compile."""
    varieties = found("varieties")
    assert varieties and all(0 < count <= MOST for count in varieties.values()), varieties
