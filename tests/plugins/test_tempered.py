"""A plugin's loss with a trained parameter: trained, saved, resumed and run on several ranks."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open

from drawloom.components.checkpoint.reader import load_node_state
from support.runs import drawloom, rows, take_back, write_corpus

PLUGIN = Path(__file__).parent / "tempered"
LOSS = 'extends = "./tiny.toml"\n[loss]\nuse = "tempered.next_token"\nmax_bytes = 4096\n'
COMMON = ("run", "tempered.toml", "model.num_hidden_layers=2", "batch.micro_size=1", "trainer.steps=4")
CHECKPOINTS = ("checkpoint.every=2", "checkpoint.keep=9")


@pytest.fixture(scope="module")
def installed(install: Callable[[Path], dict[str, str]]) -> dict[str, str]:
    """Return a Python's environment variables, with the plugin."""
    return install(PLUGIN)


@pytest.fixture(scope="module")
def run_folder(installed: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a recipe that uses the loss, and its run in one process."""
    folder = tmp_path_factory.mktemp("tempered")
    write_corpus(folder)
    (folder / "tempered.toml").write_text(LOSS, "utf-8")
    launch(installed, folder, 1, "run.name=one", *CHECKPOINTS)
    return folder


def launch(environment: dict[str, str], folder: Path, ranks: int, *words: str) -> None:
    """Run the recipe in several processes with the plugin."""
    site = environment["PYTHONPATH"].partition(":")[0]
    outcomes = drawloom(folder, *COMMON, *words, ranks=ranks, path=site)
    assert [outcome.code for outcome in outcomes] == [0] * ranks, outcomes


def losses(run: Path) -> list[float]:
    """Return the losses of all steps."""
    return [row["loss"] for row in rows(run)]


def test_parameter_of_the_loss_is_saved_but_not_exported(run_folder: Path) -> None:
    """The checkpoint has the trained parameter under `loss` with its moments; the export has only the model."""
    checkpoint = run_folder / "runs/one/checkpoints/step-4"
    state = load_node_state(checkpoint, "stages")
    assert state["loss.log"].shape == (1,) and state["loss.log"].item() != 0
    assert load_node_state(checkpoint, "optimizer")["loss.log"]["exp_avg"].abs() > 0
    with safe_open(run_folder / "runs/one/export/model.safetensors", "pt") as export:
        names = set(export.keys())
    assert names == {name for name in state if not name.startswith("loss.")}


def test_two_pipeline_ranks_match_one_process(run_folder: Path, installed: dict[str, str]) -> None:
    """With a tied embedding on both ranks and a split backward pass, losses are the same."""
    launch(
        installed, run_folder, 2, "run.name=two", "mesh.pipeline=2", "schedule.use=pipeline.schedules.zero_bubble_1p"
    )
    assert losses(run_folder / "runs/two") == pytest.approx(losses(run_folder / "runs/one"), rel=1e-6)


def test_resumed_run_is_bitwise_equal(run_folder: Path, installed: dict[str, str]) -> None:
    """A run resumed after step 2 has bitwise the same losses and the same parameter."""
    launch(installed, run_folder, 1, "run.name=again", *CHECKPOINTS)
    take_back(run_folder / "runs/again", 2)
    launch(installed, run_folder, 1, "run.name=again", *CHECKPOINTS)
    assert losses(run_folder / "runs/again") == losses(run_folder / "runs/one")
    ours, theirs = (
        load_node_state(run_folder / "runs" / name / "checkpoints/step-4", "stages") for name in ("again", "one")
    )
    assert ours["loss.log"].equal(theirs["loss.log"])


def test_own_tests_of_the_plugin_pass(installed: dict[str, str]) -> None:
    """The installed plugin's tests pass, which check the contract of losses."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "drawloom.pytest_plugin", "tests"]
    env = {**installed, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=PLUGIN, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
