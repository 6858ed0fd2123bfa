"""Runs from Python equal runs of the command line, also in a thread with an event loop and another stdout."""

import asyncio
import contextlib
import io
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import drawloom
from drawloom.components.phases.forward_backward import ForwardBackward
from drawloom.components.run.trainer import Trainer
from drawloom.components.sampling.sample import Sample
from support.mutations import put
from support.processes import run_ranks
from support.runs import drawloom as command
from support.runs import rows, series, write_corpus

LEARNED = ("step", "loss", "grad_norm", "lr", "tokens", "validation_loss")


def _train(folder: Path, name: str) -> None:
    os.chdir(folder)
    recipe = drawloom.Recipe.load("tiny.toml", f"run.name={name}", "optimizer.lr=1e-3")
    with recipe.open() as run:
        run.get(Trainer).run()


def _train_in_a_notebook(folder: Path) -> str:
    """Train like a Jupyter cell: outside the main thread, inside an event loop, with its own stdout."""

    class Cell(io.TextIOBase):
        def __init__(self) -> None:
            self.text = ""

        def write(self, text: str) -> int:
            self.text += text
            return len(text)

    async def loop() -> None:
        _train(folder, "notebook")

    before, sys.stdout = sys.stdout, Cell()
    try:
        thread = threading.Thread(target=asyncio.run, args=(loop(),))
        thread.start()
        thread.join()
        return sys.stdout.text
    finally:
        sys.stdout = before


@pytest.mark.parametrize("where", ["script", "notebook"])
def test_a_run_from_python_has_the_losses_of_the_command_line(tmp_path: Path, where: str) -> None:
    """All metrics of all steps and the exported weights are bitwise equal."""
    write_corpus(tmp_path)
    assert command(tmp_path, "run", "tiny.toml", "optimizer.lr=1e-3")[0].code == 0
    if where == "script":
        run_ranks(_train, 1, tmp_path, "script", variables=False)
    else:
        (text,) = run_ranks(_train_in_a_notebook, 1, tmp_path, variables=False)
        assert "step 10/10" in text
    runs = tmp_path / "runs"
    assert series(runs / "tiny", *LEARNED) == series(runs / where, *LEARNED)
    weights = [(runs / name / "export" / "model.safetensors").read_bytes() for name in ("tiny", where)]
    assert weights[0] == weights[1]


def _run_with_signal(folder: Path, number: int, where: str) -> tuple[int, int]:
    """Run from Python, send a signal in a step or a final task, and return `run`'s result and the last step."""
    os.chdir(folder)
    owner, name = {"step": (ForwardBackward, "run_phase"), "sample": (Sample, "run_after_training")}[where]
    call = getattr(owner, name)

    def signal_and_call(*arguments: Any) -> Any:
        os.kill(os.getpid(), number)
        return call(*arguments)

    put(owner, name, signal_and_call)
    with drawloom.Recipe.load("tiny.toml", "trainer.steps=3", "evaluate.every='never'").open() as run:
        ended = run.get(Trainer).run()
    return ended, len(rows(folder / "runs/tiny"))


@pytest.mark.parametrize(("where", "steps"), [("step", 1), ("sample", 3)])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_run_and_the_script_goes_on(tmp_path: Path, where: str, steps: int, number: int) -> None:
    """`run` returns the signal number, and neither `run` nor the `with` block raises."""
    write_corpus(tmp_path)
    assert run_ranks(_run_with_signal, 1, tmp_path, number, where, variables=False) == [(number, steps)]


def _run_with_bug(folder: Path) -> tuple[str, str, str]:
    """Run from Python with a bug on rank 1, and return the error's type, its text and its uncaught output."""
    os.chdir(folder)
    if os.environ["RANK"] == "1":
        put(ForwardBackward, "run_phase", lambda *_: 1 // 0)
    try:
        with drawloom.Recipe.load("tiny.toml", "batch.micro_size=2", "trainer.on_finish=[]").open() as run:
            run.get(Trainer).run()
    except drawloom.UserError as error:
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            sys.excepthook(type(error), error, error.__traceback__)
        return type(error).__name__, str(error), printed.getvalue()
    raise AssertionError("no UserError")


def test_a_failure_among_ranks_is_an_error_that_is_printed_once(tmp_path: Path) -> None:
    """Every rank raises the same error, and Python prints nothing more if the script does not catch it."""
    write_corpus(tmp_path)
    outcomes = run_ranks(_run_with_bug, 2, tmp_path)
    text = "rank 1, step 1, phase [forward_backward]: ZeroDivisionError: integer division or modulo by zero"
    assert outcomes == [("ReportedError", text, "")] * 2
