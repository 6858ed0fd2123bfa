"""Exports from before parameters had Hugging Face's names train as before."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from drawloom.components.model.decoder.experts import Router
from support.mutations import put
from support.processes import run_ranks
from support.runs import Outcome, command, rows, write_corpus

EXPORTS = Path(__file__).parents[1] / "golden/exports"
"""
Exports written at commit 4a395f3 after one step, when parameters had other names and initial weights came from torch's
generator; `losses.json` has the float64 values of the three steps that this commit trained next.
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
tie_word_embeddings = true
decoder_sparse_step = 2
num_experts = 3
num_experts_per_tok = 2
moe_intermediate_size = 4
"""

CORPUS = '''
from hashlib import blake2b
from pathlib import Path

from drawloom import component


@component
class ByName:
    """The corpus of the earlier code, whose files' names decided the split."""

    def documents(self, split):
        for path in sorted(Path("corpus").glob("*.py")):
            fraction = int.from_bytes(blake2b(path.name.encode(), digest_size=8).digest(), "big") / 2**64
            if (fraction < 0.2) == (split == "validation"):
                yield path.read_text().replace("(k)", "(x)").replace("return k", "return x")
'''

RECIPES = {"dense": SIZES, "moe": SIZES + EXPERTS}


@pytest.mark.parametrize("name", RECIPES)
def test_an_earlier_export_has_its_earlier_losses(name: str, tmp_path: Path) -> None:
    """
    A run from the export's weights has the losses, gradient norms and validation losses of the earlier code.

    In float64, processors that sum in another order differ in the last digits only, so 12 digits are compared. The
    earlier code rounded a row's router loss weight to float32 and counted padding, as `_run_with_rounded_weights` does.
    """
    write_corpus(tmp_path)
    (tmp_path / "recipe.toml").write_text(RECIPES[name], "utf-8")
    (tmp_path / "by_name.py").write_text(CORPUS, "utf-8")
    words = [
        "run",
        "recipe.toml",
        "--import=by_name.py",
        "corpus.use=by_name",
        "trainer.steps=3",
        "evaluate.every=3",
        f"stages.weights={EXPORTS / name}",
    ]
    words += [f"precision.{purpose}=float64" for purpose in ("parameter", "compute", "gradient")]
    (outcome,) = run_ranks(_run_with_rounded_weights, 1, tmp_path, words, timeout=60, variables=False)
    assert outcome.code == 0, outcome.text
    expected = json.loads((EXPORTS / "losses.json").read_text("utf-8"))[name]
    steps = [{key: row[key] for key in step} for row, step in zip(rows(tmp_path / "runs/tiny"), expected, strict=True)]
    for step, reference in zip(steps, expected, strict=True):
        assert step == pytest.approx(reference, rel=1e-12)


def _run_with_rounded_weights(folder: Path, words: Sequence[str]) -> Outcome:
    """Run a command with row weights of the router loss rounded to float32."""

    def round_row_weights(self: Router, weights: Tensor) -> Tensor:
        loss_weights = weights.sum(1) * self.aux_loss_coef  # float32, as the weights are
        return loss_weights.double() / self.aux_loss_coef

    forward = Router.forward

    def count_padding(self: Router, hidden: Tensor, weights: Tensor | None = None, _padding: Any = None) -> Any:
        return forward(self, hidden, weights)

    put(Router, "sum_row_weights", round_row_weights)
    put(Router, "forward", count_padding)
    return command(folder, words, None)
