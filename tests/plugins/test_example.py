"""The installed example plugin: listed, used in a recipe, and tested with drawloom's fixtures."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PLUGIN = Path(__file__).parent / "perplexity"

TINY = [
    "--overlay",
    str(PLUGIN / "with_perplexity.toml"),
    "trainer.steps=2",
    "sample.tokens=4",
    "corpus.use=data.text_files",
    'corpus.paths=["*.txt"]',
    "corpus.validation_fraction=0.2",
    "packing.length=16",
    "sample.context=16",
    "model.num_hidden_layers=1",
    "model.hidden_size=16",
    "model.num_attention_heads=2",
    "model.num_key_value_heads=1",
    "model.head_dim=8",
    "model.intermediate_size=16",
    "batch.global_size=2",
    "batch.micro_size=2",
]

COMMANDS = """
import sys
from drawloom.graph.cli.main import main
words = sys.argv[1:]
sys.exit(main(["list", "--plugins"]) or main(["list", "language"]) or main(["show", "first_run", *words])
         or main(["run", "first_run", *words]))
"""


@pytest.fixture(scope="module")
def installed(install: Callable[[Path], dict[str, str]]) -> dict[str, str]:
    """Return a Python's environment variables, with the plugin."""
    return install(PLUGIN)


def test_recipe_uses_the_plugin(installed: dict[str, str], tmp_path: Path) -> None:
    """The plugin's metric is listed and resolved with its distribution, and a run records its values."""
    for number in range(12):
        (tmp_path / f"{number}.txt").write_text(f"{number} " + "some text to learn from\n" * 20, "utf-8")
    command = [sys.executable, "-c", COMMANDS, *TINY]
    done = subprocess.run(command, cwd=tmp_path, env=installed, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "language.perplexity  drawloom-perplexity 1.2.0  drawloom_perplexity.metric:Perplexity" in done.stdout
    assert "maximum: number = 1000000.0  (upper limit of the written value)" in done.stdout
    assert "drawloom-perplexity 1.2.0; " in done.stdout and "maximum = 1000.0" in done.stdout
    lines = (tmp_path / "runs" / "first_run" / "metrics.jsonl").read_text("utf-8").splitlines()
    assert [0 < json.loads(line)["perplexity"] <= 1000.0 for line in lines[1:]] == [True, True]


def test_own_tests_of_the_plugin_pass(installed: dict[str, str]) -> None:
    """The plugin's tests pass with drawloom's fixtures."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "drawloom.pytest_plugin", "tests"]
    env = {**installed, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=PLUGIN, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout + done.stderr
