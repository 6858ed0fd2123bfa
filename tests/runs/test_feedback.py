"""KTO on one process and on meshes."""

from pathlib import Path

import pytest

from support.chat import tokenizer_folder
from support.runs import drawloom, series

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

[model]
use = "model.qwen3.dense"
num_hidden_layers = 2
hidden_size = 32
num_attention_heads = 2
num_key_value_heads = 2
head_dim = 16
intermediate_size = 32
"""
LAYOUTS = {
    "microbatches": (1, ("batch.micro_size=1",)),
    "replicas": (2, ("mesh.data_replicate=2", "batch.micro_size=1")),
    "stages": (2, ("mesh.pipeline=2", "batch.micro_size=2")),
}


def test_losses_do_not_depend_on_microbatches_or_the_mesh(tmp_path: Path) -> None:
    """The divergence is of the whole step, so that smaller microbatches, replicas and stages have equal losses."""
    (tmp_path / "tiny.toml").write_text(RECIPE, "utf-8")
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
