"""Distillation from stored predictions and from a teacher model, on one process and on meshes."""

import shutil
from pathlib import Path

import pytest

from support.runs import deterministic_rows, drawloom, rows, series, take_back

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
loss = { use = "loss.distill", reference = "data" }
metrics.divergence = { use = "metrics.mean", of = "divergence" }
"""
TAUGHT = """
extends = "tiny.toml"
run.name = "taught"
trainer = { steps = 4, on_finish = [] }
checkpoint = { every = 2, keep = 9 }
optimizer.lr = 1e-2
batch.global_size = 8
loss = { use = "loss.distill", task_weight = 0.25, divergence = "jsd", temperature = 2.0 }
metrics.divergence = { use = "metrics.mean", of = "divergence" }

[teacher]
use = "stages.frozen"
model = { use = "model.auto", path = "runs/teacher/export" }

[model]
num_hidden_layers = 2
"""
OFFLINE = """
extends = "taught.toml"
unset = ["teacher.model"]
teacher = { use = "data.teacher_logps", path = "predictions" }
packing.teacher = "@teacher"
loss.reference = "data"
"""
ITSELF = """
extends = "taught.toml"
unset = ["model"]
model = { use = "model.auto", path = "runs/teacher/export" }
"""
MESHES = {
    "tensor": (2, ("mesh.tensor=2", "batch.micro_size=4", "model.num_key_value_heads=2")),
    "both": (4, ("mesh.pipeline=2", "mesh.data_shard=2", "batch.micro_size=2")),
}
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


@pytest.mark.soak
def test_a_teacher_model_gives_the_losses_of_one_process_on_every_mesh(folder: Path) -> None:
    """
    A teacher with other sizes is divided like its student. Its divergence from itself is 0.

    A resumed run has the straight one's bits, and another teacher in the folder is refused.
    """
    (folder / "teacher.toml").write_text(f'extends = "tiny.toml"\nrun.seed = 3\nrun.name = "teacher"\n{MODEL}', "utf-8")
    (folder / "taught.toml").write_text(TAUGHT, "utf-8")
    stored = 'extends = "tiny.toml"\nmodel = { use = "model.auto", path = "runs/teacher/export" }\n'
    (folder / "stored.toml").write_text(stored, "utf-8")
    (made,) = drawloom(folder, "run", "teacher.toml", 'trainer.on_finish=["@export"]', "trainer.steps=4")
    assert made.code == 0, made.text
    check_against_stored_predictions(folder)
    learned = {}
    for name, (ranks, layout) in {"one": (1, ()), **MESHES}.items():
        words = ("model.num_key_value_heads=2", f"run.name={name}", *layout)
        outcomes = drawloom(folder, "run", "taught.toml", *words, ranks=ranks)
        assert [outcome.code for outcome in outcomes] == [0] * ranks, outcomes[0].text
        learned[name] = series(folder / "runs" / name, "loss", "divergence", "grad_norm")
    for name in MESHES:
        for ours, theirs in zip(learned[name], learned["one"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5), name
    whole, last = deterministic_rows(folder / "runs/one"), folder / "runs/one/checkpoints/step-4"
    before = {path.name: path.read_bytes() for path in last.glob("rank-*")}
    words = ("run", "taught.toml", "run.name=one", "model.num_key_value_heads=2")
    take_back(folder / "runs/one", 2)
    (resumed,) = drawloom(folder, *words)
    assert resumed.code == 0 and deterministic_rows(folder / "runs/one") == whole, resumed.text
    assert {path.name: path.read_bytes() for path in last.glob("rank-*")} == before != {}
    (evaluated,) = drawloom(folder, "evaluate", "runs/one")
    assert evaluated.code == 0 and "loss" in evaluated.text, evaluated.text
    (again,) = drawloom(folder, "run", "teacher.toml", "run.seed=5", 'trainer.on_finish=["@export"]', "run.name=other")
    assert again.code == 0, again.text
    shutil.rmtree(folder / "runs/teacher/export")
    (generated,) = drawloom(folder, "generate", "runs/one", "--prompt", "def", "--tokens", "2")
    assert generated.code == 0, generated.text
    shutil.copytree(folder / "runs/other/export", folder / "runs/teacher/export")
    take_back(folder / "runs/one", 2)
    (refused,) = drawloom(folder, *words)
    assert refused.code != 0 and "are not the weights that the run started with" in refused.text, refused.text


def check_against_stored_predictions(folder: Path) -> None:
    """Stored predictions for all tokens have the same loss and gradient; the teacher itself has none."""
    student = ("trainer.steps=1", "checkpoint.every=9", "loss.task_weight=0", "loss.temperature=1")
    (written,) = drawloom(folder, "teacher-logps", "stored.toml", "--to", "predictions", "--top-k", "257")
    assert written.code == 0, written.text
    (folder / "offline.toml").write_text(OFFLINE, "utf-8")
    (folder / "itself.toml").write_text(ITSELF, "utf-8")
    runs = {"stored": "offline.toml", "model": "taught.toml", "itself": "itself.toml"}
    losses = {}
    for name, recipe in runs.items():
        (outcome,) = drawloom(folder, "run", recipe, *student, f"run.name={name}")
        assert outcome.code == 0, outcome.text
        ((loss, norm),) = series(folder / "runs" / name, "loss", "grad_norm")
        losses[name] = loss, norm
    assert losses["model"] == pytest.approx(losses["stored"], rel=1e-3) and losses["model"][0] > 0.01
    assert losses["itself"] == pytest.approx((0.0, 0.0), abs=1e-5)
