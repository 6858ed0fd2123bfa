"""Preference losses beside a frozen copy of the model."""

import json
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


def test_evaluate_measures_the_divergence_over_all_answers(tmp_path: Path) -> None:
    """`drawloom evaluate` gives the run's validation loss, although KTO's depends on all answers at once."""
    (tmp_path / "tiny.toml").write_text(RECIPE + QWEN3, "utf-8")
    answers = [{"prompt": f"hello {n}", "completion": "good day" * (1 + n % 4), "label": n % 3 > 0} for n in range(120)]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in answers), "utf-8")
    base = (f"vars.base={tokenizer_folder(tmp_path / 'base')}", "tokens.paths=['answers.jsonl']", "vars.length=48")
    rows = ("tokens.validation_fraction=0.5", "validation.rows_used=1000", "batch.micro_size=1")
    steps = ("trainer.steps=6", "batch.global_size=8", "optimizer.lr=3e-3")
    (trained,) = drawloom(tmp_path, "run", "tiny.toml", "run.name=kto", *base, *rows, *steps)
    assert trained.code == 0, trained.text
    (evaluated,) = drawloom(tmp_path, "evaluate", "runs/kto", "--format", "json")
    [*_, (expected, divergence)] = series(tmp_path / "runs/kto", "validation_loss", "kl")
    assert divergence > 0 and json.loads(evaluated.text)["loss"] == pytest.approx(expected, rel=1e-6)
