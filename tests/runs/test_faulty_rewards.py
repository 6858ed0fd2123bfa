"""Faults in rewards and rollouts: one clear message, no checkpoint of the step, and a resume with the same bits."""

from pathlib import Path

import pytest

from runs.test_rollouts import RECIPE
from support.processes import RanksFailedError
from support.runs import deterministic_rows, drawloom, rows

FAULTY = '''
import os
import time
from collections.abc import Sequence

import attrs
import torch

from drawloom import component, setting
from drawloom.ports import Answer


@component
class Faulty:
    """A reward with a fault in the calls of the third step, on the last rank, unless the file `repaired` exists."""

    weight: float = setting(default=1.0, doc="factor")
    fault: str = setting(default="raises", impact="safe", doc="kind of fault")
    calls_by_step: int = setting(default=2, impact="safe", doc="microbatches")
    _calls: int = attrs.field(init=False, default=0)

    def scores(self, answers: Sequence[Answer]) -> list[float | None]:
        """Return 1 for the letter a."""
        self._calls += 1
        is_last = not torch.distributed.is_initialized() or torch.distributed.get_rank() > 0
        if self._calls == 2 * self.calls_by_step + 1 and is_last and not os.path.exists("repaired"):
            if self.fault == "raises":
                raise ConnectionError("the judge does not answer")
            if self.fault == "is killed":
                os.kill(os.getpid(), 9)
            if self.fault == "hangs":
                time.sleep(999)
        if self.fault == "is silent":
            return [None] * len(answers)
        return [float("a" in answer.text) for answer in answers]
'''
WORDS = ("rewards.judge.use=faulty", "rollouts.exact=false", "evaluate.every=9", "evaluate.at_start=false")


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    (tmp_path / "tiny.toml").write_text(RECIPE, "utf-8")
    (tmp_path / "faulty.py").write_text(FAULTY, "utf-8")
    return tmp_path


def run_until_fault(lab: Path, *words: str) -> str:
    """Run two ranks, both of which must fail, and return their output."""
    try:
        outcomes = drawloom(lab, *words, ranks=2)
    except RanksFailedError as failed:  # a rank that waits for a lost one ends without a return
        outcomes = [*failed.values.values()]
    assert all(outcome.code != 0 for outcome in outcomes)
    left = [path.read_text("utf-8") for path in lab.glob("printed-*")]
    for path in lab.glob("printed-*"):
        path.unlink()
    return "\n".join([*left, *(outcome.text for outcome in outcomes)])


@pytest.mark.soak
def test_a_run_resumes_once_its_reward_is_repaired(lab: Path) -> None:
    """
    A reward raises on one rank, or hangs: all ranks end with its name, and its step is not saved.

    Repaired, the run samples again and continues like an unbroken one.
    """
    shards = ("mesh.data_shard=2", "batch.micro_size=1", "rewards.judge.calls_by_step=2")
    (lab / "repaired").touch()
    words = ("run", "tiny.toml", "--import", "faulty.py", *WORDS)
    for outcome in drawloom(lab, *words, *shards, "run.name=unbroken", ranks=2):
        assert outcome.code == 0, outcome.text
    whole = deterministic_rows(lab / "runs/unbroken")
    assert len(whole) == 4
    faults = {"raises": "the judge does not answer; a reward returns None", "hangs": "phase [rollout]"}
    for fault, text in faults.items():
        (lab / "repaired").unlink()
        more = (*shards, f"rewards.judge.fault={fault}", f"run.name={fault}", "listeners.timeouts.step=3.0")
        printed = run_until_fault(lab, *words, *more)
        assert len({line for line in printed.splitlines() if text in line}) == 1, printed
        folder = lab / "runs" / fault
        assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-2"]
        (lab / "repaired").touch()
        assert [outcome.code for outcome in drawloom(lab, *words, *more, ranks=2)] == [0, 0]
        assert deterministic_rows(folder) == whole


def test_a_step_without_any_score_is_skipped(lab: Path) -> None:
    """A warning has the reason and a metric counts the completions; a run with such a last step fails at its end."""
    words = ("run", "tiny.toml", "--import", "faulty.py", *WORDS, "rewards.judge.fault=is silent")
    (outcome,) = drawloom(lab, *words, 'rollout.rewards=["@rewards.judge"]', "trainer.steps=2")
    assert outcome.code == 1, outcome.text
    assert all(f"step {step}/2 skipped: there was no token to learn from" in outcome.text for step in (1, 2))
    assert [row["unscored"] for row in rows(lab / "runs/grpo")] == [1.0, 1.0]
