"""
Budgets of the whole tree, printed by `make figures`; `test_budgets.py` lets none of them grow.

Tokens count, because long lines hide size. "Imported" are the code lines of drawloom's modules that a process has
loaded after `check first_run`, and after a run of it. The journeys are those of `make journeys`.
"""

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from support.structure import ROOT, code_lines, tokens

FOLDERS = ("graph", "components", "kernels", "src")


def measure() -> dict[str, int]:
    """Return the measures by name. Takes a process that checks and runs a recipe."""
    files = [path for name in FOLDERS for path in (ROOT / name).rglob("*.py")]
    texts = {path: path.read_text("utf-8") for path in files}
    outside = [path for path, text in texts.items() if "float8" in text and path.parent.name != "float8"]
    source = {
        "tokens of the source": sum(map(tokens, texts.values())),
        "files that name float8 outside its folder": len(outside),
    }
    paths = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, __file__], env=os.environ | paths, stdout=subprocess.PIPE, text=True, check=True
    )
    imported: dict[str, int] = json.loads(run.stdout.splitlines()[-1])
    return source | imported


def _count_imported_lines(names: Iterable[str]) -> int:
    paths = [sys.modules[name].__file__ for name in names if name.startswith("drawloom")]
    return sum(code_lines(Path(path).read_text("utf-8")) for path in paths if path)


def main() -> None:
    """Check and run first_run in this process, and print its imports and journeys as JSON."""
    from drawloom.graph.cli.main import main as command_line

    with contextlib.redirect_stdout(io.StringIO()):
        command_line(["check", "first_run"])
    imported = {"code lines imported by check": _count_imported_lines(list(sys.modules))}
    from house import journeys

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        functions = journeys.trace(Path(folder) / "run")
    imported["code lines imported by run"] = _count_imported_lines(list(sys.modules))
    for journey, files in functions.items():
        imported[f"functions on the journey {journey}"] = sum(map(len, files.values()))
        imported[f"files on the journey {journey}"] = len(files)
    print(json.dumps(imported))


if __name__ == "__main__":
    main()
