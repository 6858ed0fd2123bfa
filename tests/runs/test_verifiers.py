"""Reinforcement learning in an environment of the package `verifiers`, or of a stand-in for it."""

from pathlib import Path

import pytest

from runs.test_rollouts import RECIPE
from runs.test_turns import ENDS, completions_of
from support.runs import deterministic_rows, drawloom, rows, series
from support.verifiers_package import PACKAGES, importable

TALK = """
extends = "./tiny.toml"
unset = ["examples"]
collator = { use = "ends", environment = "@environment" }
environment = { use = "environments.verifiers", environment = "talk" }
sampler = { use = "rollouts.stages", max_tokens = 12, exact = true }
rollout.rollouts = "@rollouts"
evaluate.rollouts = "@rollouts"
rewards.environment = { use = "rewards.environment", cut = -2.0, by_fault = -0.5 }
record_rollouts = { every = 1, rows = 99 }
[rollouts]
use = "rollouts.turns"
sampler = "@sampler"
"""


@pytest.mark.parametrize("package", PACKAGES)
def test_a_policy_learns_in_an_environment_with_turns_and_a_tool(tmp_path: Path, package: str) -> None:
    """
    Whole conversations have three turns, the tool's messages and the rubric's reward; others are counted faults.

    An error of the environment does not end the run, ratios are exactly 1, and a second run has the same bits.
    """
    for name, text in {"tiny.toml": RECIPE, "talk.toml": TALK, "ends.py": ENDS}.items():
        (tmp_path / name).write_text(text, "utf-8")
    folders = []
    with importable(package):
        for name in ("one", "again"):
            words = ("run", "talk.toml", "--import", "ends.py", f"run.name={name}", "trainer.steps=3")
            (outcome,) = drawloom(tmp_path, *words)
            assert outcome.code == 0, outcome.text
            folders.append(tmp_path / "runs" / name)
    one, again = folders
    assert series(one, "sampler_difference", "ratio") == [(0.0, 1.0)] * 3
    assert deterministic_rows(one) == deterministic_rows(again)
    recorded = completions_of(one)
    assert {len(line["turns"]) for line in recorded} >= {1, 3, 5} and len(recorded) == 48
    for line in recorded:
        sampled = [text for kind, text in line["turns"] if kind == "sampled"]
        messages = [text for kind, text in line["turns"] if kind == "environment"]
        assert messages == ["ab"[len(text) % 2] * 2 for text in sampled[: len(messages)]]
        expected = -2.0 if "max_tokens" in line["faults"] else 0.25 * sum(map(len, sampled))
        if "environment_error" in line["faults"]:
            expected = 0.0
            assert len(sampled[-1]) % 4 == 3
        else:
            assert len(sampled) == 3 or "max_tokens" in line["faults"]
        assert line["rewards"]["rewards.environment"] == pytest.approx(expected - 0.5 * sum(line["faults"].values()))
    for kind in ("environment_error", "max_tokens"):
        count = sum(line["faults"].get(kind, 0) for line in recorded)
        assert count == sum(row[f"faults/{kind}"] for row in rows(one)) > 0
