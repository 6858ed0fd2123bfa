"""Runs that keep an average of their weights."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from support.runs import deterministic_rows, drawloom, series, take_back, write_corpus

WITH_EMA = """
extends = "tiny.toml"
[ema]
use = "phases.ema"
decay = 0.5
[edit.trainer.phases]
after."@optimizer" = "@ema"
[evaluate]
average = "@ema"
[export]
average = "@ema"
"""


def test_evaluation_and_export_use_the_average(tmp_path: Path) -> None:
    """
    Training losses equal those of a run without the average; validation losses and the export use the average.

    This also holds after a resume and for commands with --average.
    """
    write_corpus(tmp_path)
    (tmp_path / "ema.toml").write_text(WITH_EMA)
    words = ("validation.rows_used=1000", "evaluate.every=4", "checkpoint.keep=9")
    assert drawloom(tmp_path, "run", "tiny.toml", *words)[0].code == 0
    run = tmp_path / "runs/ema"
    assert drawloom(tmp_path, "run", "ema.toml", "run.name=ema", *words)[0].code == 0
    whole = deterministic_rows(run)
    take_back(run, 4)
    outcome = drawloom(tmp_path, "run", "ema.toml", "run.name=ema", *words)[0]
    assert outcome.code == 0 and "resuming after step 4" in outcome.text, outcome.text
    assert deterministic_rows(run) == whole
    assert series(run, "step", "loss") == series(tmp_path / "runs/tiny", "step", "loss")
    by_step = {row["step"]: row["validation_loss"] for row in whole if "validation_loss" in row}
    for step, loss in by_step.items():
        text = drawloom(tmp_path, "evaluate", "runs/ema", "--step", str(step), "--average")[0].text
        assert text.startswith(f"runs/ema, step {step}: loss {loss:.4f} over "), text
    outcome = drawloom(tmp_path, "export", "runs/ema", "--to", "average", "--average")[0]
    assert outcome.code == 0, outcome.text
    exported, written = (load_file(tmp_path / name / "model.safetensors") for name in ("runs/ema/export", "average"))
    last = load_file(tmp_path / "runs/tiny/export/model.safetensors")
    assert all(torch.equal(exported[name], weight) for name, weight in written.items())
    assert not any(torch.equal(exported[name], weight) for name, weight in last.items() if weight.ndim > 1)
    refused = drawloom(tmp_path, "export", "runs/tiny", "--to", "other", "--average")[0]
    assert refused.code == 2 and "has no average of its weights; leave --average out, or train" in refused.text
