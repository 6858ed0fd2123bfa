"""A plugin's feature for stages: noise for training alone, without a change to the source."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from drawloom.components.checkpoint.reader import load_node_state
from support.runs import drawloom, rows, take_back, write_corpus

PLUGIN = Path(__file__).parent / "weight_noise"
NOISE = 'extends = "./tiny.toml"\n[noise]\nuse = "weight_noise.gaussian"\n'
COMMON = ("model.num_hidden_layers=2", "trainer.steps=4", "checkpoint.every=2", "checkpoint.keep=9", "evaluate.every=4")


@pytest.fixture(scope="module")
def installed(install: Callable[[Path], dict[str, str]]) -> dict[str, str]:
    """Return a Python's environment variables, with the plugin."""
    return install(PLUGIN)


def test_noise_of_a_plugin_changes_training_alone(installed: dict[str, str], tmp_path: Path) -> None:
    """Only training losses differ while weights are equal; noise with std 0 and a resumed run are bitwise."""
    write_corpus(tmp_path)
    (tmp_path / "noise.toml").write_text(NOISE, "utf-8")
    site = installed["PYTHONPATH"].partition(":")[0]

    def run(name: str, recipe: str, *words: str) -> list[dict[str, float]]:
        (outcome,) = drawloom(tmp_path, "run", recipe, f"run.name={name}", *COMMON, *words, path=site)
        assert outcome.code == 0, outcome
        return rows(tmp_path / "runs" / name)

    plain, silent = run("plain", "tiny.toml"), run("silent", "noise.toml", "noise.std=0.0")
    noisy = run("noisy", "noise.toml", "noise.std=0.1")
    assert [row["loss"] for row in silent] == [row["loss"] for row in plain]
    assert noisy[0]["loss"] != plain[0]["loss"]
    still = [run(f"still_{recipe}", f"{recipe}.toml", "optimizer.lr=1e-30") for recipe in ("tiny", "noise")]
    assert still[0][0]["loss"] != still[1][0]["loss"]
    assert still[0][-1]["validation_loss"] == still[1][-1]["validation_loss"]
    folder = tmp_path / "runs/noisy"
    before = load_node_state(folder / "checkpoints/step-4", "stages")
    take_back(folder, 2)
    assert [row["loss"] for row in run("noisy", "noise.toml", "noise.std=0.1")] == [row["loss"] for row in noisy]
    after = load_node_state(folder / "checkpoints/step-4", "stages")
    assert all(after[name].equal(tensor) for name, tensor in before.items())


@pytest.mark.soak
def test_own_tests_of_the_plugin_pass(installed: dict[str, str]) -> None:
    """The installed plugin's tests pass, and check its contract."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "drawloom.pytest_plugin", "tests"]
    env = {**installed, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=PLUGIN, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
