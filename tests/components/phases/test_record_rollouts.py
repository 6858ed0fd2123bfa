"""The record of sampled completions."""

import json
from pathlib import Path
from typing import Any

import torch

from drawloom.components.data.bytes import Bytes
from drawloom.components.phases.advantages import Advantages
from drawloom.components.phases.record_rollouts import RecordRollouts
from drawloom.components.ports.rollouts import Completions, Scored
from drawloom.components.ports.run import RunFolder, Step
from drawloom.testing import fake

NAN = float("nan")


def two_completions() -> Scored:
    """Two completions of one prompt: one ended, the other cut."""
    tokenizer = Bytes()
    rows = torch.tensor([[*tokenizer.encode("ab=c"), tokenizer.eos_id], [*tokenizer.encode("ab=de")]])
    zeros = torch.zeros(2, 5)
    starts, ends = torch.tensor([3, 3]), torch.tensor([5, 5])
    completions = Completions(rows, starts, ends, zeros, zeros, torch.tensor([True, False]))
    scores, totals = torch.tensor([[1.0, NAN], [0.0, 2.0]]).double(), torch.tensor([1.0, 4.0]).double()
    return Scored(completions, 2, ("right", "long"), scores, totals)


def test_a_record_has_texts_rewards_advantages_and_stop_reasons(tmp_path: Path, one_rank: Any) -> None:
    """Every n-th and the last step have a line; a run that goes back replaces the later lines."""

    def run(*indices: int) -> list[Any]:
        record = RecordRollouts(
            folder=fake(RunFolder, folder=tmp_path), mesh=one_rank, tokenizer=Bytes(), every=2, rows=3
        )
        for index in indices:
            step = Step(index, 5)
            step.state["rollouts"] = [two_completions(), two_completions()]
            Advantages().run_phase(step)
            record.run_phase(step)
        record.close()
        return [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text("utf-8").splitlines()]

    lines = run(1, 2, 3, 4, 5)
    assert [line["step"] for line in lines] == [2, 4, 5]
    first, second, _ = lines[0]["completions"]
    assert first == {
        "prompt": "ab=",
        "completion": "c",
        "rewards": {"right": 1.0, "long": None},
        "reward": 1.0,
        "advantage": -1.5,
        "tokens": 2,
        "stop": "end",
    }
    assert (second["completion"], second["advantage"], second["stop"]) == ("de", 1.5, "length")
    assert [line["step"] for line in run(3, 4)] == [2, 4]
