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

ROOT = Path(__file__).parents[2]

MAX_VARIANTS = 5
"""Most compiled variants: for sizes of 1, multiples of 16, and small sizes with smaller tiles."""


def compile_report(report: str) -> Any:
    """Compile in a process without Triton's interpreter, and return the report."""
    program = str(ROOT / "tests" / "support" / "ahead_of_time.py")
    environment = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    return json.loads(subprocess.check_output([sys.executable, program, report], env=environment))


def test_all_kernels_pass_type_checks() -> None:
    """Every kernel, forward and backward and for all model dtypes, passes the compiler's front end."""
    assert compile_report("failures") == {}


def test_random_sizes_need_few_compiled_kernels() -> None:
    """A hundred random sizes need at most MAX_VARIANTS compiled kernels, so that training does not stop to compile."""
    varieties = compile_report("varieties")
    assert varieties and all(0 < count <= MAX_VARIANTS for count in varieties.values()), varieties
