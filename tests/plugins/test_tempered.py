"""A loss of another package, with a parameter of its own: trained, saved, resumed and spread over ranks."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open

from drawloom.components.checkpoint.reader import load_node
from support.runs import drawloom, rows, take_back, write_corpus

PLUGIN = Path(__file__).parent / "tempered"
LOSS = 'extends = "./tiny.toml"\n[loss]\nuse = "tempered.next_token"\nmax_bytes = 4096\n'
COMMON = ("run", "tempered.toml", "model.num_hidden_layers=2", "batch.micro_size=1", "trainer.steps=4")
CHECKPOINTS = ("checkpoint.every=2", "checkpoint.keep=9")


@pytest.fixture(scope="module")
def installed(install: Callable[[Path], dict[str, str]]) -> dict[str, str]:
    """The environment of a Python that has the plugin."""
    return install(PLUGIN)


@pytest.fixture(scope="module")
def place(installed: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe that uses the loss, and a run of it in one process."""
    folder = tmp_path_factory.mktemp("tempered")
    write_corpus(folder)
    (folder / "tempered.toml").write_text(LOSS, "utf-8")
    launch(installed, folder, 1, "run.name=one", *CHECKPOINTS)
    return folder


def launch(environment: dict[str, str], folder: Path, ranks: int, *words: str) -> None:
    """Run the recipe in so many processes, which find the plugin."""
    site = environment["PYTHONPATH"].partition(":")[0]
    outcomes = drawloom(folder, *COMMON, *words, ranks=ranks, path=site)
    assert [outcome.code for outcome in outcomes] == [0] * ranks, outcomes


def losses(run: Path) -> list[float]:
    """The losses of all steps."""
    return [row["loss"] for row in rows(run)]


def test_its_parameter_is_trained_and_saved_but_not_exported(place: Path) -> None:
    """The checkpoint holds it under `loss`, no longer 0, with its moments; the export has the model alone."""
    checkpoint = place / "runs/one/checkpoints/step-4"
    state = load_node(checkpoint, "stages")
    assert state["loss.log"].shape == (1,) and state["loss.log"].item() != 0
    assert load_node(checkpoint, "optimizer")["loss.log"]["exp_avg"].abs() > 0
    with safe_open(place / "runs/one/export/model.safetensors", "pt") as export:
        names = set(export.keys())
    assert names == {name for name in state if not name.startswith("loss.")}


def test_two_pipeline_ranks_learn_what_one_does(place: Path, installed: dict[str, str]) -> None:
    """With a tied embedding on both ranks, and a backward pass in two parts, losses and the parameter are the same."""
    launch(installed, place, 2, "run.name=two", "mesh.pipeline=2", "schedule.use=pipeline.schedules.zero_bubble_1p")
    assert losses(place / "runs/two") == pytest.approx(losses(place / "runs/one"), rel=1e-6)


def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(place: Path, installed: dict[str, str]) -> None:
    """Taken back to step 2 and run again, losses and the parameter are the same."""
    launch(installed, place, 1, "run.name=again", *CHECKPOINTS)
    take_back(place / "runs/again", 2)
    launch(installed, place, 1, "run.name=again", *CHECKPOINTS)
    assert losses(place / "runs/again") == losses(place / "runs/one")
    ours, theirs = (load_node(place / "runs" / name / "checkpoints/step-4", "stages") for name in ("again", "one"))
    assert ours["loss.log"].equal(theirs["loss.log"])


def test_its_own_tests_pass(installed: dict[str, str]) -> None:
    """It keeps the contract of losses, where it is installed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "drawloom.graph.testing.pytest_plugin", "tests"]
    env = {**installed, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=PLUGIN, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
