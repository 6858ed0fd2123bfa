"""
Tests on several releases of torch and Python: `make test-versions`, which prints a table for docs/versions.md.

A version is PYTHON:TORCH, such as 3.12:2.15, and gets an environment of its own below .versions; or the path of an
interpreter, whose environment is taken as it is. Pythons that are not on this machine are left out.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = [
    *("tests/meshes", "tests/schedules", "tests/kernels"),
    *(
        f"tests/components/{name}"
        for name in ("checkpoint", "distributed", "kernels", "model", "parallel", "pipeline", "stages")
    ),
]
EXTRA = {"2.11": ["numpy<2.4"]}
"""Further requirements by release of torch: Triton 3.6 interprets kernels (only in tests) with NumPy below 2.4."""

LIST_VERSIONS = (
    "import sys, torch, triton, numpy; print(sys.version.split()[0], torch.__version__, triton.__version__, "
    "numpy.__version__)"
)


def make_environment(version: str) -> Path | None:
    """Install drawloom with one Python and torch, and return the interpreter; None without such a Python."""
    python, torch = version.split(":")
    if (found := shutil.which(f"python{python}")) is None or subprocess.run([found, "-V"]).returncode:
        return None
    interpreter = ROOT / f".versions/python{python}-torch{torch}/bin/python"
    if not interpreter.exists():
        subprocess.run([found, "-m", "venv", interpreter.parents[1]], check=True)
        requirements = [f"{ROOT}[dev]", f"torch=={torch}.*", *EXTRA.get(torch, ())]
        subprocess.run([interpreter, "-m", "pip", "install", "--quiet", *requirements], check=True)
    return interpreter


def run_tests(interpreter: Path, folders: list[str], workers: int) -> str:
    """Run the tests with an interpreter, and return a row of the table."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [
        str(interpreter),
        "-m",
        "pytest",
        "-q",
        "-m",
        "not soak",
        "-n",
        str(workers),
        "--dist",
        "loadfile",
        *folders,
    ]
    versions = subprocess.run([interpreter, "-c", LIST_VERSIONS], capture_output=True, text=True, check=True).stdout
    tests = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    log = ROOT / f".versions/{'-'.join(versions.split())}.log"
    log.parent.mkdir(exist_ok=True)
    log.write_text(tests.stdout + tests.stderr)
    counts = re.findall(r"(\d+) (passed|failed|errors?|skipped)", tests.stdout.rstrip().rpartition("\n")[2])
    text = ", ".join(f"{count} {outcome}" for count, outcome in counts) or f"exit code {tests.returncode}"
    return f"| {' | '.join(versions.split())} | {text} | {date.today()} |"


def main() -> None:
    """Run the tests on every version, and print the table's rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="+")
    parser.add_argument("--folders", nargs="+", default=FOLDERS)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    print("| Python | torch | Triton | NumPy | tests | date |\n|---|---|---|---|---|---|")
    for version in options.versions:
        interpreter = make_environment(version) if re.fullmatch(r"[\d.]+:[\d.]+", version) else Path(version)
        if interpreter is None:
            print(f"python{version.partition(':')[0]} is not on this machine", file=sys.stderr)
        else:
            print(run_tests(interpreter, options.folders, options.workers), flush=True)


if __name__ == "__main__":
    main()
