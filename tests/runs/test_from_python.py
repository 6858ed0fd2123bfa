"""A run from Python is the run of the command line, also in a thread with an event loop and another stdout."""

import asyncio
import io
import os
import sys
import threading
from pathlib import Path

import pytest

import drawloom
from drawloom.components.run.trainer import Trainer
from support.processes import run_ranks
from support.runs import drawloom as command
from support.runs import series, write_corpus

LEARNED = ("step", "loss", "grad_norm", "lr", "tokens", "validation_loss")


def _train(folder: Path, name: str) -> None:
    os.chdir(folder)
    recipe = drawloom.Recipe.load("tiny.toml", f"run.name={name}", "optimizer.lr=1e-3")
    with recipe.open() as run:
        run.get(Trainer).run()


def _train_in_a_notebook(folder: Path) -> str:
    """As a kernel of Jupyter may run a cell: not in the main thread, while an event loop runs, with its own stdout."""

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
    """Every metric of every step is equal, bit by bit, and so are the exported weights."""
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
