"""`drawloom ladder`: the coordinate check over widths."""

import json
from pathlib import Path
from typing import Any

from support.runs import drawloom

NARROW = """
extends = "./tiny.toml"
optimizer.lr = 0.02

[model]
use = "model.granite"
num_hidden_layers = 2
hidden_size = 16
num_attention_heads = 2
num_key_value_heads = 2
head_dim = 8
intermediate_size = 32
tie_word_embeddings = false
initializer_range = 0.25
"""


def ladder(folder: Path, *words: str, code: int = 0) -> dict[str, Any]:
    """Return the JSON of a ladder over four widths."""
    outcome = drawloom(folder, "ladder", "narrow.toml", "--steps", "6", *words, "--format", "json")[0]
    assert outcome.code == code, outcome.text
    answer: dict[str, Any] = json.loads(outcome.text[outcome.text.index("{\n") :])
    return answer


def test_activations_keep_their_size_in_mup_alone(folder: Path) -> None:
    """Over four widths muP's slopes are flat; in the standard parametrization outputs grow with the width."""
    (folder / "narrow.toml").write_text(NARROW, "utf-8")
    mup = ladder(folder, "--to", "ladder")
    assert mup["flat"] and all(abs(slope) < 0.15 for slope in mup["slopes"].values())
    assert [rung["multiple"] for rung in mup["rungs"]] == [1, 2, 4, 8]
    standard = ladder(folder, "--parametrization", "standard", "--multiples", "1,4")
    assert not standard["flat"] and all(slope > 0.5 for slope in standard["slopes"].values())
    check = drawloom(folder, "check", "narrow.toml", "--overlay", "ladder/x8.toml")[0]
    assert check.code == 0, check.text


def test_learning_rates_are_compared_by_width(folder: Path) -> None:
    """Every width has a loss for each rate; one width alone is refused."""
    (folder / "narrow.toml").write_text(NARROW, "utf-8")
    answer = ladder(folder, "--multiples", "1,8", "--lr", "1e-4,2e-2")
    for rung in answer["rungs"]:
        assert rung["losses"].keys() == {"0.0001", "0.02"} and rung["losses"]["0.02"] < rung["losses"]["0.0001"]
    assert "one width has no slope" in ladder(folder, "--multiples", "2", code=2)["error"]["text"]
