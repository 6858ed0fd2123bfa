"""Distillation from stored predictions, on one process and on meshes."""

from pathlib import Path

import pytest

from support.runs import drawloom, rows, series

MODEL = """
[model]
use = "model.qwen3.dense"
hidden_size = 32
num_attention_heads = 2
num_key_value_heads = 2
head_dim = 16
intermediate_size = 32
initializer_range = 0.2
num_hidden_layers = 2
"""
STUDENT = """
extends = "tiny.toml"
run.name = "student"
trainer = { steps = 12, on_finish = [] }
optimizer.lr = 1e-2
batch.global_size = 8
packing.teacher = "@teacher"
teacher = { use = "data.teacher_logps", path = "predictions" }
loss.use = "loss.distill"
metrics.divergence = { use = "metrics.mean", of = "divergence" }
"""
LAYOUTS = {
    "shards": (2, ("mesh.data_shard=2", "batch.micro_size=2")),
    "stages": (2, ("mesh.pipeline=2", "batch.micro_size=4")),
}


def test_a_student_learns_its_teacher_on_every_mesh(folder: Path) -> None:
    """
    The teacher itself has a divergence of 0, up to the rounding of stored numbers; another model approaches it.

    Losses are those of one process, and predictions for other rows are refused.
    """
    (folder / "teacher.toml").write_text(f'extends = "tiny.toml"\nrun.seed = 3\n{MODEL}', "utf-8")
    (folder / "student.toml").write_text(STUDENT + MODEL, "utf-8")
    words = ("teacher-logps", "teacher.toml", "--to", "predictions", "--top-k", "16")
    (written,) = drawloom(folder, *words)
    assert written.code == 0 and "16 tokens by position" in written.text, written.text
    (same,) = drawloom(folder, "run", "student.toml", "run.name=same", "run.seed=3", "trainer.steps=1")
    assert same.code == 0, same.text
    assert abs(rows(folder / "runs/same")[0]["divergence"]) < 1e-4
    (other,) = drawloom(folder, "run", "student.toml", "run.name=other", "run.seed=4")
    assert other.code != 0 and "seed is 3 there, and 4 here" in other.text, other.text
    learned = {}
    for name, (ranks, layout) in {"one": (1, ()), **LAYOUTS}.items():
        more = ("run.seed=3", "model.initializer_range=0.1", f"run.name={name}", *layout)
        outcomes = drawloom(folder, "run", "student.toml", *more, ranks=ranks)
        assert [outcome.code for outcome in outcomes] == [0] * ranks, outcomes[0].text
        learned[name] = series(folder / "runs" / name, "loss", "divergence", "grad_norm")
    assert learned["one"][-1][0] < 0.6 * learned["one"][0][0]
    for name in LAYOUTS:
        for ours, theirs in zip(learned[name], learned["one"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5), name
