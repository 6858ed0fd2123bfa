"""Exports from before parameters had Hugging Face's names train as before."""

import json
from pathlib import Path

import pytest

from support.runs import drawloom, rows, write_corpus

EXPORTS = Path(__file__).parents[1] / "golden/exports"
"""
Written at commit 4a395f3, when parameters had names of their own and initial weights came from torch's generator, by
one step of these models; `losses.json` has what that commit computed in three steps from them, in float64.
"""

SIZES = """
extends = "./tiny.toml"

[model]
num_hidden_layers = 2
hidden_size = 8
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 4
intermediate_size = 12
"""

EXPERTS = """
use = "model.qwen3.moe"
tokenizer = "@tokenizer"
tie_word_embeddings = true
decoder_sparse_step = 2
num_experts = 3
num_experts_per_tok = 2
moe_intermediate_size = 4
"""

RECIPES = {"dense": SIZES, "moe": SIZES + EXPERTS}


@pytest.mark.parametrize("name", RECIPES)
def test_an_earlier_export_has_its_earlier_losses(name: str, tmp_path: Path) -> None:
    """
    Losses, gradient norms and validation losses of a run from the export's weights are those of the earlier code.

    In float64, processors that sum in another order differ in the last digits only, so 12 digits are compared; with
    experts 11, since the earlier code added up the weights of a row's tokens in float32.
    """
    write_corpus(tmp_path)
    (tmp_path / "recipe.toml").write_text(RECIPES[name], "utf-8")
    words = ["run", "recipe.toml", "trainer.steps=3", "evaluate.every=3", f"stages.weights={EXPORTS / name}"]
    words += [f"precision.{purpose}=float64" for purpose in ("parameter", "compute", "gradient")]
    (outcome,) = drawloom(tmp_path, *words)
    assert outcome.code == 0, outcome.text
    expected = json.loads((EXPORTS / "losses.json").read_text("utf-8"))[name]
    found = [{key: row[key] for key in step} for row, step in zip(rows(tmp_path / "runs/tiny"), expected, strict=True)]
    for step, reference in zip(found, expected, strict=True):
        assert step == pytest.approx(reference, rel=1e-11 if name == "moe" else 1e-12)
