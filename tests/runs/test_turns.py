"""Reinforcement learning over several turns with tools, on one process and on meshes."""

import json
from pathlib import Path
from typing import Any

import pytest

from runs.test_rollouts import LAYOUTS, RECIPE, SAMPLED, run_long
from support.processes import RanksFailedError
from support.runs import deterministic_rows, drawloom, rows, series, take_back

ENDS = '''
from collections.abc import Sequence

from drawloom import component
from drawloom.components.data.prompt_collator import PromptCollator
from drawloom.ports import Example, PromptBatch


@component
class Ends(PromptCollator):
    """Prompts whose turns end at many tokens, so that a random model has several turns."""

    def collate(self, examples: Sequence[Example], length: int) -> PromptBatch:
        ends = frozenset({256, *range(1, 256, 4)})
        return super().collate(examples, length).evolve(end_ids=(ends,) * len(examples))
'''
TALK = '''
from drawloom import component
from drawloom.ports import Environment, Example, Reply


@component
class Talk:
    """An environment calling a tool for the model, by the length of its turns, until three have ended."""

    inner: Environment
    tool_schemas = ()

    def reset(self, example: Example) -> "Episode":
        return Episode(self.inner.reset(example))


class Episode:
    def __init__(self, inner):
        self.inner, self.turns = inner, 0

    def step(self, text: str) -> Reply:
        self.turns += 1
        reply = self.inner.step(f"[look {len(text)}]")
        return Reply(reply.message, reward=0.25 * len(text), is_done=self.turns == 3, faults=reply.faults)
'''
LOOK = '''
import os
import pathlib
import signal

from drawloom import tool


@tool
def look(length: str) -> str:
    """Return a text, or raise for every fourth length; kill the run at its third step, once, if a file says so."""
    path, metrics = pathlib.Path("kill"), pathlib.Path("runs/killed/metrics.jsonl")
    if path.exists() and metrics.exists() and metrics.read_text().count("\\n") == 3:
        path.unlink()
        run = int(pathlib.Path(f"/proc/{os.getppid()}/stat").read_text().split()[3])
        os.kill(run, signal.SIGKILL)
    return "ab"[int(length) % 4 // (int(length) % 4 != 3)] * 2
'''
TURNS = """
extends = "./tiny.toml"
[collator]
use = "ends"
environment = "@environment"
[sampler]
use = "rollouts.stages"
max_tokens = 20
exact = true
[rollouts]
use = "rollouts.turns"
sampler = "@sampler"
environment = "@environment"
[environment]
use = "talk"
inner = "@inner"
[inner]
use = "environments.tools"
calls = "brackets"
tools = ["@look"]
[look]
use = "look"
[rollout]
rollouts = "@rollouts"
[evaluate]
rollouts = "@rollouts"
[rewards.environment]
use = "rewards.environment"
by_fault = -0.5
cut = -2.0
[record_rollouts]
every = 1
rows = 99
"""
WORDS = ("run", "turns.toml", "--import", "ends.py", "--import", "talk.py", "--import", "look.py")


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    files = {"tiny.toml": RECIPE, "turns.toml": TURNS, "ends.py": ENDS, "talk.py": TALK, "look.py": LOOK}
    for name, text in files.items():
        (tmp_path / name).write_text(text, "utf-8")
    return tmp_path


def run(lab: Path, name: str, *words: str, ranks: int = 1) -> Path:
    outcomes = drawloom(lab, *WORDS, f"run.name={name}", *words, ranks=ranks)
    assert [outcome.code for outcome in outcomes] == [0] * ranks, outcomes[0].text
    return lab / "runs" / name


def completions_of(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "rollouts.jsonl").read_text("utf-8").splitlines()
    return [one for line in lines for one in json.loads(line)["completions"]]


@pytest.mark.soak
@pytest.mark.parametrize(("kernels", "layout"), [("kernels.auto", "stages"), ("kernels.batch_invariant", "shards")])
def test_ratios_of_conversations_are_exactly_1_on_meshes(lab: Path, kernels: str, layout: str) -> None:
    """
    With the environment's tokens between turns, sampled log-probabilities have the training pass's bits in every step.

    Meshes have the same conversations and rewards. The record has each turn, faults and rewards, and the metrics their
    sums; a run resumed after step 2 repeats steps 3 and 4 with the same bits.
    """
    words = (f"kernels.use={kernels}", "checkpoint.every=2")
    one = run(lab, "one", *words, "trainer.steps=4")
    assert series(one, "sampler_difference", "ratio", "clip_fraction") == [(0.0, 1.0, 0.0)] * 4
    mesh = run(lab, layout, *words, "trainer.steps=2", *LAYOUTS[layout], ranks=2)
    assert series(mesh, "sampler_difference", "ratio") == [(0.0, 1.0)] * 2
    shared = (*SAMPLED[:4], "turns", "faults/tool_error", "faults/max_tokens")
    assert series(mesh, *shared)[:2] == series(one, *shared)[:2]
    recorded, measured = completions_of(one), rows(one)
    assert len(recorded) == 64 and {len(line["turns"]) for line in recorded} > {1, 5}
    for kind in ("tool_error", "max_tokens"):
        count = sum(line["faults"].get(kind, 0) for line in recorded)
        assert count == sum(row[f"faults/{kind}"] for row in measured) > 0
    for line in recorded:
        sampled = [text for kind, text in line["turns"] if kind == "sampled"]
        assert line["stop"] == ("length" if "max_tokens" in line["faults"] else "end")
        reward = 0.25 * sum(map(len, sampled)) if line["stop"] == "end" else -2.0
        expected = reward - 0.5 * sum(line["faults"].values())
        assert line["rewards"]["rewards.environment"] == pytest.approx(expected), line
    whole = deterministic_rows(one)
    take_back(one, 2)
    run(lab, "one", *words, "trainer.steps=4")
    assert deterministic_rows(one) == whole and completions_of(one) == recorded


@pytest.mark.parametrize("layouts", [["stages"], pytest.param(["shards", "tensor"], marks=pytest.mark.soak)], ids=str)
def test_shared_beginnings_change_no_gradient_on_any_mesh(lab: Path, layouts: list[str]) -> None:
    """
    Conversations that share prompts and turns have the separate rows' losses and gradients in float64, on every mesh.

    SGD's update is the gradient, so the last step's values depend on all earlier gradients.
    """
    words = (
        "precision.parameter=float64",
        "sampler.exact=false",
        "sampler.temperature=0.4",
        "optimizer.use=optim.sgd",
        "optimizer.lr=1e-2",
        "loss.variant=gspo",
        "advantages.equal_groups=drop",
        "evaluate.every=9",
        "trainer.steps=2",
    )
    names = ("loss", "grad_norm", "ratio", "clip_fraction", "sampler_difference", "reward")
    separate = run(lab, "separate", *words)
    turns = [line["turns"] for line in completions_of(separate)]
    groups = [turns[first : first + 4] for first in range(0, len(turns), 4)]
    assert any(
        len(turns) > 3 and [turns[:2] for turns in group].count(turns[:2]) > 1 for group in groups for turns in group
    )
    for name in ("shared", *layouts):
        layout = LAYOUTS.get(name, ())
        folder = run(lab, name, *words, *layout, "--overlay", "with_shared_prefixes", ranks=2 if layout else 1)
        for ours, theirs in zip(series(folder, *names), series(separate, *names), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-12), folder


@pytest.mark.soak
def test_a_run_killed_inside_a_tool_resumes_with_the_same_bits(lab: Path) -> None:
    """A run killed while a tool of its third step runs samples this step again, and ends like an unbroken one."""
    words = ("rollout.minibatches=2", "checkpoint.every=1", "kernels.use=kernels.batch_invariant")
    unbroken = run(lab, "unbroken", *words)
    (lab / "kill").touch()
    with pytest.raises(RanksFailedError):
        run(lab, "killed", *words)
    assert not (lab / "kill").exists() and len(rows(lab / "runs/killed")) == 2
    killed = run(lab, "killed", *words)
    assert deterministic_rows(killed) == deterministic_rows(unbroken)
    assert completions_of(killed) == completions_of(unbroken)


@pytest.mark.soak  # four minutes on two cores
def test_the_shipped_recipe_learns_to_use_the_calculator(tmp_path: Path) -> None:
    """After a short supervised run that calls it half of the time, the reward on held-out sums rises clearly."""
    run_long(tmp_path, "run", "sums", "run.name=base")
    run_long(tmp_path, "run", "tools", "vars.base=runs/base/export", "run.name=policy", "validation.rows_used=256")
    lines = map(json.loads, (tmp_path / "runs/policy/metrics.jsonl").read_text("utf-8").splitlines())
    measured = [*lines]
    held_out = [value for line in measured if (value := line.get("validation_reward")) is not None]
    assert 0.2 < held_out[0] < 0.55 and held_out[-1] > held_out[0] + 0.2, held_out
    turns = [line["turns"] for line in measured if "turns" in line]
    assert turns[-1] > turns[0] + 0.2 and max(line.get("sampler_difference", 0) for line in measured) < 1e-3
