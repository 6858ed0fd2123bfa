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

OLDEST = ROOT / ".venv" / "oldest-triton"

MAX_VARIANTS = 5
"""Most compiled variants: for sizes of 1, multiples of 16, and small sizes with smaller tiles."""


def _report(*names: str, before: Path | None = None) -> dict[str, Any]:
    """Compile in a process without Triton's interpreter, with a folder's Triton, and return the reports by name."""
    program = str(ROOT / "tests" / "support" / "ahead_of_time.py")
    folders = [*([before] if before else []), ROOT / "src", ROOT / "tests"]
    environment = {"PYTHONPATH": ":".join(map(str, folders)), "OMP_NUM_THREADS": "1"}
    lines = subprocess.check_output([sys.executable, program, *names], env=environment).splitlines()
    return dict(zip(names, map(json.loads, lines), strict=True))


@pytest.fixture(scope="module")
def reports() -> dict[str, Any]:
    """Return the reports of the installed Triton."""
    return _report("varieties", "failures")  # in this order: kernels of the second report may be compiled already


def test_all_kernels_pass_type_checks(reports: dict[str, Any]) -> None:
    """Every kernel in the source is launched for the models' dtypes, and passes the compiler's front end."""
    assert reports["failures"] == {}


@pytest.mark.skipif(not OLDEST.exists(), reason="needs the oldest Triton: make .venv/test")
def test_all_kernels_pass_the_oldest_compiler() -> None:
    """The oldest Triton that drawloom allows accepts every kernel, too."""
    assert _report("failures", before=OLDEST)["failures"] == {}


def test_random_sizes_need_few_compiled_kernels(reports: dict[str, Any]) -> None:
    """A hundred random sizes need at most MAX_VARIANTS compiled kernels, so that training does not stop to compile."""
    varieties = reports["varieties"]
    assert varieties and all(0 < count <= MAX_VARIANTS for count in varieties.values()), varieties
