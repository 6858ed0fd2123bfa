"""
Triton kernels compiled for GPUs on any machine.

The interpreter, which runs the other tests, is lenient about types and compiles nothing, so it cannot tell how often a
GPU would have to wait for the compiler.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

MAX_VARIANTS = 5
"""Most compiled variants: for sizes of 1, multiples of 16, and small sizes with smaller tiles."""


@pytest.fixture(scope="module")
def reports() -> dict[str, Any]:
    """Compile in a process without Triton's interpreter, and return the reports by name."""
    program = str(ROOT / "tests" / "support" / "ahead_of_time.py")
    environment = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    names = ("varieties", "failures")  # in this order: kernels of the second report may be compiled already
    lines = subprocess.check_output([sys.executable, program, *names], env=environment).splitlines()
    return dict(zip(names, map(json.loads, lines), strict=True))


def test_all_kernels_pass_type_checks(reports: dict[str, Any]) -> None:
    """Every kernel in the source is launched for the models' dtypes, and passes the compiler's front end."""
    assert reports["failures"] == {}


def test_random_sizes_need_few_compiled_kernels(reports: dict[str, Any]) -> None:
    """A hundred random sizes need at most MAX_VARIANTS compiled kernels, so that training does not stop to compile."""
    varieties = reports["varieties"]
    assert varieties and all(0 < count <= MAX_VARIANTS for count in varieties.values()), varieties
