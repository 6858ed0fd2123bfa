"""`drawloom ladder`: the coordinate check, and a fitted loss."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

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
attention_multiplier = 0.125
initializer_range = 0.25
"""


def ladder(folder: Path, *words: str, code: int = 0, recipe: str = NARROW) -> dict[str, Any]:
    """Return the JSON of a ladder over four sizes."""
    (folder / "narrow.toml").write_text(recipe, "utf-8")
    outcome = drawloom(folder, "ladder", "narrow.toml", "--steps", "6", *words, "--format", "json")[0]
    assert outcome.code == code, outcome.text
    answer: dict[str, Any] = json.loads(outcome.text[outcome.text.index("{\n") :])
    return answer


@pytest.mark.soak
def test_activations_keep_their_size_over_widths_in_mup_alone(folder: Path) -> None:
    """Over four widths muP's slopes are flat; in the standard parametrization outputs grow with the width."""
    mup = ladder(folder, "--to", "ladder")
    assert mup["flat"] and all(abs(slope) < 0.15 for slope in mup["slopes"].values())
    assert [rung["multiple"] for rung in mup["rungs"]] == [1, 2, 4, 8]
    standard = ladder(folder, "--parametrization", "standard", "--multiples", "1,4")
    assert not standard["flat"] and all(slope > 0.5 for slope in standard["slopes"].values())
    check = drawloom(folder, "check", "narrow.toml", "--overlay", "ladder/x8.toml")[0]
    assert check.code == 0, check.text
    # operations grow with the layers' matrices, quadratic in the width, and with the head, linear in it
    flops = [rung["flops"] for rung in mup["rungs"]]
    assert all(2 < wide / narrow < 4 for narrow, wide in pairwise(flops))
    fit = mup["fit"]
    assert fit["exponent_low"] < fit["exponent"] < fit["exponent_high"] and fit["exponent"] < 0
    assert standard["fit"] is None


@pytest.mark.soak
@pytest.mark.parametrize(("model", "optimizer"), [("model.qwen3.dense", "optim.muon"), ("model.llama", "optim.adamw")])
def test_models_without_multipliers_and_muon_keep_the_size_of_activations(
    folder: Path, model: str, optimizer: str
) -> None:
    """Over four widths muP's slopes are flat with folded multipliers and with Muon's own learning rates."""
    recipe = NARROW.replace("model.granite", model).replace("attention_multiplier = 0.125\n", "")
    recipe = recipe.replace("optimizer.lr", f'optimizer.use = "{optimizer}"\noptimizer.lr')
    mup = ladder(folder, recipe=recipe)
    assert mup["flat"] and [rung["multiple"] for rung in mup["rungs"]] == [1, 2, 4, 8]
    if optimizer == "optim.muon":
        standard = ladder(folder, "--parametrization", "standard", "--multiples", "1,4", recipe=recipe)
        assert all(slope > 0.5 for slope in standard["slopes"].values())


@pytest.mark.soak
def test_activations_keep_their_size_over_depths_in_completep_alone(folder: Path) -> None:
    """Over four depths CompleteP's last layer is flat; muP, which scales with the width alone, fails the check."""
    completep = ladder(folder, "--parametrization", "completep", "--dimension", "depth")
    assert completep["flat"] and completep["slopes"].keys() == {"last layer"}
    mup = ladder(folder, "--dimension", "depth", "--multiples", "1,4", code=1)
    assert mup["slopes"]["last layer"] > 0.3


def test_picture_has_a_curve_per_layer_and_the_fit(folder: Path) -> None:
    """The SVG document has a line with three points per layer, the losses, and the dashed fit."""
    assert "one size has no slope" in ladder(folder, "--multiples", "2", code=2)["error"]["text"]
    words = ("--steps", "2", "--multiples", "1,2,3", "--parametrization", "standard", "--format", "svg")
    outcome = drawloom(folder, "ladder", "narrow.toml", *words)[0]
    svg = ElementTree.fromstring(outcome.text[outcome.text.index("<svg") :])
    lines = [element for element in svg if element.tag.endswith("polyline")]
    assert [len(line.attrib["points"].split()) for line in lines if "stroke-dasharray" not in line.attrib] == [3, 3, 3]
    assert [len(line.attrib["points"].split()) for line in lines if "stroke-dasharray" in line.attrib] == [2]
    assert len([element for element in svg if element.tag.endswith("circle")]) == 9


@pytest.mark.soak
def test_best_learning_rate_is_the_same_over_widths_in_mup_alone(folder: Path) -> None:
    """From the narrowest to the widest model, the best rate stays in muP, and falls otherwise."""
    words = ("--multiples", "1,8", "--lr", "3e-3,1e-2,3e-2", "--steps", "24")
    best = {
        name: [rung["best_lr"] for rung in ladder(folder, *words, "--parametrization", name)["rungs"]]
        for name in ("mup", "standard")
    }
    assert best["mup"][0] == best["mup"][1] and best["standard"][0] > best["standard"][1], best
