"""Memory of whole runs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from drawloom.components.pipeline.executor import ProgramExecutor
from support.processes import run_ranks
from support.runs import Outcome, command, drawloom, rows, write_corpus

TINY = ("run", "tiny.toml", "trainer.on_finish=[]", "trainer.steps=2")


def _run_out_of_memory(folder: Path, arguments: Any, where: str) -> Outcome:
    """Run with a second step, or an opening, that tries to allocate 563 TB."""
    steps = []

    def allocate_too_much(*_parts: Any, **_words: Any) -> Any:
        steps.append(1)
        return torch.empty(2**47) if len(steps) > 1 or where == "open" else original(*_parts, **_words)

    original = getattr(ProgramExecutor, where)
    setattr(ProgramExecutor, where, allocate_too_much)
    return command(folder, arguments, None)


@pytest.mark.parametrize("where", ["run_forward_and_backward", "open"])
def test_out_of_memory_ends_a_run_in_words(where: str, tmp_path: Path) -> None:
    """A failed allocation names its size, the memory by kind and the settings, without a traceback."""
    write_corpus(tmp_path)
    [outcome] = run_ranks(_run_out_of_memory, 1, tmp_path, TINY, where, timeout=120, variables=False)
    assert outcome.code == 1 and "Traceback" not in outcome.text
    assert "562.95 TB could not be allocated" in outcome.text
    assert "optimizer state " in outcome.text and "activations and workspace" in outcome.text
    assert "batch.micro_size = 4" in outcome.text and "mesh.data_shard = 1" in outcome.text
    assert 'stages.recompute = "none"' in outcome.text


def test_a_pipeline_reports_memory_by_kind(tmp_path: Path) -> None:
    """Rank 0 prints the memory plan; metrics by kind count float32 master weights and bfloat16 copies."""
    write_corpus(tmp_path)
    words = (
        "mesh.pipeline=2",
        "model.num_hidden_layers=2",
        "precision.compute='bfloat16'",
        "metrics.memory.by_kind=true",
    )
    outcomes = drawloom(tmp_path, *TINY, *words, ranks=2)
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes[0].text
    last = rows(tmp_path / "runs/tiny")[-1]
    assert last["memory/masters"] == 2 * last["memory/compute_copies"] == last["memory/gradients"] > 0
    assert last["memory/optimizer_state"] == 2 * last["memory/masters"]
    line = next(line for line in outcomes[0].text.splitlines() if line.startswith("memory  "))
    assert "masters" in line and "compute copies" in line and "optimizer state" in line
    assert "memory  " not in outcomes[1].text
