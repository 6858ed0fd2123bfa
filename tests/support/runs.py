"""Small runs of the first recipe, each in its own processes."""

import contextlib
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from drawloom.components.commands.runs._replay import MACHINE_METRICS
from drawloom.components.distributed.rank_console import create_rank_console
from drawloom.components.storage.step_log import CHECKSUM
from drawloom.graph.cli.main import main
from support.forked_children import fork_children
from support.processes import RanksFailedError, run_ranks

SOURCE = str(Path(__file__).parents[2] / "src")
TINY = """
extends = "first_run"
unset = ["html_report"]

[run]
name = "tiny"

[corpus]
use = "data.text_files"
paths = ["corpus/*.py"]
validation_fraction = 0.2

[vars]
length = 32

[device]
share = true

[model]
num_hidden_layers = 1
hidden_size = 16
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 8
intermediate_size = 32

[validation]
rows_used = 8

[batch]
global_size = 4
micro_size = 4

[evaluate]
every = 5
at_start = false

[checkpoint]
every = 4
keep = 2

[trainer]
steps = 10
on_finish = ["@export", "@sample"]

[sample]
tokens = 4

[listeners.logging]
use = "listeners.logging"
"""

REPORT = ("html_report.use=report.html", "trainer.on_finish=['@export', '@sample', '@html_report']")
"""Words for a tiny run with a report, whose drawings take longer than some runs."""

QWEN3 = """
[model]
use = "model.qwen3.dense"
num_hidden_layers = 2
hidden_size = 32
num_attention_heads = 2
num_key_value_heads = 2
head_dim = 16
intermediate_size = 32
"""


def write_corpus(folder: Path, files: int = 12, lines: int = 5) -> None:
    """Write a corpus of small programs, 2 of 12 for validation, and the recipe `tiny.toml`."""
    (folder / "corpus").mkdir()
    for number in range(files):
        text = "".join(f"def f{number}_{line}(k):\n    return k * {line} + {number}\n\n" for line in range(lines))
        (folder / "corpus" / f"part{number}.py").write_text(text, "utf-8")
    (folder / "tiny.toml").write_text(TINY, "utf-8")


@attrs.frozen
class Outcome:
    """A command's exit code and output."""

    code: int
    text: str


def drawloom(folder: Path, *arguments: str, ranks: int = 1, path: str = "") -> list[Outcome]:
    """Run a command in `folder` in this many processes, which find packages in the folder `path`, too."""
    words = folder, arguments, None, path
    outcomes: list[Outcome] = run_ranks(command, ranks, *words, timeout=120, variables=ranks > 1)
    return outcomes


def run_and_kill(folder: Path, name: str, *arguments: str, after: float) -> bool:
    """Run a command that kills itself this many steps after the tracked ones; return whether it did."""
    written = folder / "runs" / name / "metrics.jsonl"
    done = len(rows(written.parent)) if written.exists() else 0
    words = (*arguments, f"run.name={name}")
    try:
        run_ranks(command, 1, folder, words, (written, done + after), timeout=120, variables=False)
    except RanksFailedError as failed:
        assert all("-9" in text or "gone" in text for text in failed.failures.values()), failed
        return True
    return False


def command(
    folder: Path, arguments: Sequence[str], kill_after: tuple[Path, float] | None, path: str = "", forks: bool = True
) -> Outcome:
    """
    Run one process of `drawloom`, which kills itself after this many lines of a file; for `run_ranks`.

    If it `forks`, the processes that it starts are forked from it.
    """
    os.chdir(folder)
    if forks:
        fork_children()
    if path:
        sys.path.append(path)
        os.environ["PYTHONPATH"] = os.pathsep.join([SOURCE, path])  # of the processes that it starts
    if kill_after is not None:
        threading.Thread(target=_kill_after, args=kill_after, daemon=True).start()
    with open(f"printed-{os.getpid()}", "w+", encoding="utf-8") as file:
        with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            code = _code(list(arguments))
        file.seek(0)
        return Outcome(code, file.read())


def run_and_strike(folder: Path, arguments: Sequence[str], number: int) -> Outcome:
    """Run one process of `drawloom` for `run_ranks`; rank 1, or a single one, sends itself a signal after step 1."""
    if os.environ.get("RANK", "1") == "1":
        name = next((word for word in arguments if word.startswith("run.name=")), "run.name=tiny")
        run = folder / "runs" / name.removeprefix("run.name=")
        threading.Thread(target=_strike, args=(run, number), daemon=True).start()
    return command(folder, arguments, None)


def _strike(run: Path, number: int) -> None:
    while not ((run / "metrics.jsonl").exists() and rows(run)):
        time.sleep(0.01)
    (run / "struck").touch()
    os.kill(os.getpid(), number)


def _kill_after(path: Path, lines: float) -> None:
    """Kill this process after this many lines; the fractional part is a delay of up to a twentieth of a second."""
    while not path.exists() or path.read_bytes().count(b"\n") < int(lines):
        time.sleep(0.001)
    time.sleep(lines % 1 / 20)
    os.kill(os.getpid(), signal.SIGKILL)


def _code(arguments: list[str]) -> int:
    try:
        return main(arguments, console=create_rank_console())
    except SystemExit as end:
        return int(end.code or 0)


def rows(run: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's steps in metrics.jsonl, without step 0 and without the lines' checksums."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [{key: value for key, value in line.items() if key != CHECKSUM} for line in lines if line["step"]]


def series(run: Path, *names: str) -> list[tuple[Any, ...]]:
    """Return some metrics of every step."""
    return [tuple(row.get(name) for name in names) for row in rows(run)]


def deterministic_rows(run: Path) -> list[dict[str, Any]]:
    """Return each step's metrics without the machine's, such as times."""
    kept = [{key: row[key] for key in row if key.partition("/")[0] not in MACHINE_METRICS} for row in rows(run)]
    assert all("loss" in row for row in kept)
    return kept


def take_back(run: Path, step: int) -> None:
    """Reset a finished run to the state left by a kill after this step."""
    for path in (run / "checkpoints").iterdir():
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    if (run / "export").exists():
        shutil.rmtree(run / "export")
        (run / "sample.txt").unlink()
