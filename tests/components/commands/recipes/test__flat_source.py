"""Runs as one file of plain PyTorch."""

import ast
import contextlib
import io
import json
import os
import re
import runpy
import sys
from pathlib import Path

import pytest

from drawloom import Recipe, UserError
from drawloom.components.commands.recipes._flat_source import format_flat_source
from support.processes import run_ranks
from support.runs import drawloom

LLAMA = """
extends = "./tiny.toml"
lr = { use = "learning_rate.cosine", warmup_steps = 3, end = 0.1 }

[model]
use = "model.llama"
num_hidden_layers = 2
hidden_size = 16
num_attention_heads = 2
intermediate_size = 32
tie_word_embeddings = false

[edit.trainer.phases]
remove = ["@clip"]
"""
RUNS = {
    "qwen3": ["tiny.toml", "batch.micro_size=2", "trainer.steps=20", "clip.max_norm=0.5"],
    "llama": ["llama.toml", "trainer.steps=6", "run.seed=7"],
}


def run_file(path: Path) -> str:
    """Run a Python file in its folder, in this process, and return its output."""
    os.chdir(path.parent)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(path), run_name="__main__")
    return out.getvalue()


def check_same_losses(folder: Path, words: list[str]) -> None:
    """Run a recipe and its source, and compare all losses and gradient norms."""
    words = [*words, "evaluate.every=never", "trainer.on_finish=[]", "run.name=own"]
    outcome = drawloom(folder, "run", *words)[0]
    assert outcome.code == 0, outcome.text
    assert drawloom(folder, "show", *words, "--source", "--to", "flat.py")[0].code == 0
    [printed] = run_ranks(run_file, 1, folder / "flat.py", timeout=240, variables=False)
    rows = [json.loads(line) for line in (folder / "runs/own/metrics.jsonl").read_text("utf-8").splitlines()]
    expected = [(str(row["loss"]), str(row["grad_norm"])) for row in rows]
    assert re.findall(r"loss (\S+)  grad_norm (\S+)", printed) == expected


@pytest.mark.parametrize("words", RUNS.values(), ids=RUNS.keys())
def test_the_file_computes_the_run_to_the_bit(folder: Path, words: list[str]) -> None:
    """
    All losses and gradient norms are the run's: with several microbatches and epochs, clipping, a tied head and norms
    of queries, and without them. The file imports torch and Python's modules alone.
    """
    (folder / "llama.toml").write_text(LLAMA, "utf-8")
    check_same_losses(folder, words)
    tree = ast.parse((folder / "flat.py").read_text("utf-8"))
    imports = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imports |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert {name.partition(".")[0] for name in imports} <= {"torch", *sys.stdlib_module_names}


@pytest.mark.soak
def test_the_first_run_in_one_file_has_its_losses(tmp_path: Path) -> None:
    """The shipped recipe on the standard library's source, for some steps of its schedule."""
    check_same_losses(tmp_path, ["first_run", "trainer.steps=5"])


@pytest.mark.parametrize(
    ("recipe", "words", "reason"),
    [
        ("moe", [], r"moe\.toml:\d+:\d+: \[model\] has use = 'model.qwen3.moe'"),
        ("pipeline", [], r"pipeline\.toml:8:12: \[mesh\] has pipeline = 2"),
        ("first_run", ["optimizer.amsgrad=true"], r"command line: \[optimizer\] has amsgrad = True"),
        (
            "first_run",
            ["batch.micro_size=512", "batch.global_size=512"],
            r"\[batch\] has microbatches of 131,072 tokens",
        ),
        ("first_run", ["lr.phases=[{to=1.0,curve='exponential'}]"], r"\[lr\] has phases\[0\]"),
        ("first_run", ["loss.z_loss=1e-4"], r"\[loss\] has z_loss = 0.0001"),
    ],
)
def test_what_the_file_cannot_express_is_refused(recipe: str, words: list[str], reason: str) -> None:
    """A component or setting that changes losses and isn't in the template is named with node, value and line."""
    with pytest.raises(UserError, match=reason):
        format_flat_source(Recipe.load(recipe, *words))
