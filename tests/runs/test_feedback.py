"""KTO on one process and on meshes, and preference losses beside a frozen copy of the model."""

import math
from pathlib import Path

import pytest

from support.chat import tokenizer_folder
from support.runs import QWEN3, drawloom, series

ROOT = Path(__file__).parents[2]
RECIPE = """
extends = "kto"
device.share = true
adapters.lora = { targets = ["*_proj"], rank = 4, alpha = 32.0 }
batch = { global_size = 4, micro_size = 4 }
evaluate.every = 3
optimizer.lr = 3e-2
loss.beta = 0.5
trainer = { steps = 4, on_finish = [] }
run.seed = 2
"""
LAYOUTS = {
    "microbatches": (1, ("batch.micro_size=1",)),
    "replicas": (2, ("mesh.data_replicate=2", "batch.micro_size=1")),
    "stages": (2, ("mesh.pipeline=2", "batch.micro_size=2")),
}


def test_losses_do_not_depend_on_microbatches_or_the_mesh(tmp_path: Path) -> None:
    """The divergence is of the whole step, so that smaller microbatches, replicas and stages have equal losses."""
    (tmp_path / "tiny.toml").write_text(RECIPE + QWEN3, "utf-8")
    data = (f'tokens.paths=["{ROOT}/docs/examples/feedback.jsonl"]', f"vars.base={tokenizer_folder(tmp_path / 'base')}")
    learned = {}
    for name, (ranks, words) in {"one": (1, ()), **LAYOUTS}.items():
        outcomes = drawloom(tmp_path, "run", "tiny.toml", f"run.name={name}", *data, *words, ranks=ranks)
        assert [outcome.code for outcome in outcomes] == [0] * ranks, outcomes[0].text
        learned[name] = series(tmp_path / "runs" / name, "loss", "grad_norm", "signed_reward", "kl", "validation_loss")
    assert learned["one"][0][0] == pytest.approx(0.5) and max(kl for *_, kl, _ in learned["one"]) > 0.01
    for name in LAYOUTS:
        for ours, theirs in zip(learned[name], learned["one"], strict=True):
            expected = [value or 0 for value in theirs]
            assert [value or 0 for value in ours] == pytest.approx(expected, rel=1e-4, abs=1e-6), name


def test_a_frozen_copy_is_the_reference_of_all_weights(tmp_path: Path) -> None:
    """
    With `reference = "model"` and no adapters, the losses of KTO, IPO and DPO begin as far from a copy as they must.

    KTO begins at 0.5, IPO at 1 / (2 beta) squared, and DPO at ln 2; then all weights learn.
    """
    (tmp_path / "tiny.toml").write_text(RECIPE + QWEN3, "utf-8")
    base = f"vars.base={tokenizer_folder(tmp_path / 'base')}"
    bare = (base, "optimizer.lr=1e-30", "trainer.steps=1")  # adapters start as no change
    feedback = f'tokens.paths=["{ROOT}/docs/examples/feedback.jsonl"]'
    pairs: tuple[str, ...] = ("tokens.use=data.preferences", f'tokens.paths=["{ROOT}/docs/examples/preferences.jsonl"]')
    pairs += ("metrics.signed_reward.of=reward_margin", "metrics.kl.of=reward_accuracy")
    (initial,) = drawloom(tmp_path, "run", "tiny.toml", "run.name=initial", feedback, *bare)
    (exported,) = drawloom(tmp_path, "export", "runs/initial", "--to", "initial")
    assert initial.code == exported.code == 0, initial.text + exported.text
    frozen = ("copy.use=stages.frozen", 'copy.model={use="model.auto", path="initial"}')
    words = (base, "stages.adapters=[]", *frozen, "optimizer.lr=1e-3", "trainer.steps=2")
    first = {"kto": 0.5, "ipo": 1.0, "dpo": math.log(2)}
    for name, expected in first.items():
        data = (feedback,) if name == "kto" else pairs
        loss = (f"loss.use=loss.{name}", "loss.reference=model", "loss.beta=0.5")
        (outcome,) = drawloom(tmp_path, "run", "tiny.toml", f"run.name={name}", *data, *words, *loss)
        assert outcome.code == 0, outcome.text
        losses = [value for (value,) in series(tmp_path / "runs" / name, "loss")]
        assert losses[0] == pytest.approx(expected, rel=1e-5) and losses[1] != pytest.approx(expected, rel=1e-4), name
