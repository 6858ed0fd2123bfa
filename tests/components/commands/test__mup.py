"""muP as values of a recipe."""

import math

import pytest
import tomli

from drawloom.components.commands._mup import format_overlay, scale_width
from drawloom.graph import UserError
from drawloom.graph.project import Recipe

SIZES = {
    "use": "model.granite",
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 32,
    "initializer_range": 0.25,
}


def recipe(**model: object) -> Recipe:
    """Return the first recipe with a small Granite."""
    return Recipe.load("first_run").with_values({"model": {**SIZES, **model}})


@pytest.mark.parametrize("is_tied", [False, True])
def test_effective_scales_are_those_of_the_paper(is_tied: bool) -> None:
    """
    Tensor Programs V, table 8, with m = 4: the standard deviation times the factor, and the learning rate times the
    factor, of the embedding, the hidden matrices and the head.
    """
    values = scale_width(recipe(tie_word_embeddings=is_tied).graph, 4, "mup")
    model, groups = values["model"], values["optimizer"]["groups"]
    rates = {target: group["lr_multiplier"] for group in groups for target in group["targets"]}
    std, into, out = model["initializer_range"] / 0.25, model["embedding_multiplier"], 1 / model["logits_scaling"]
    table = rates["*embed_tokens.weight"]
    head = table if is_tied else rates["*lm_head.weight"]
    assert (std * into, table * into) == (1, 1)
    assert (std, rates["*_proj.weight"]) == (1 / math.sqrt(4), 1 / 4)
    assert (std * out, head * out) == (1 / 4, 1 / 4)
    assert model["hidden_size"] == 64 and model["num_attention_heads"] == 8 and "head_dim" not in model
    recipe(tie_word_embeddings=is_tied).with_values(values).check(elsewhere=True)


def test_the_overlay_is_the_values() -> None:
    """TOML of the values gives the same recipe, and the standard parametrization changes sizes alone."""
    values = scale_width(recipe().graph, 2, "mup")
    text = format_overlay(values, "two times the width")
    assert tomli.loads(text) == values
    assert scale_width(recipe().graph, 2, "standard").keys() == {"model"}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"model": {"use": "model.qwen3.dense"}}, "write model.use=model.granite"),
        ({"model": {**SIZES, "head_dim": None}}, "has no head_dim"),
        ({"model": SIZES, "optimizer": {"groups": [{"targets": ["*"]}]}}, "has groups of its own"),
    ],
)
def test_other_recipes_are_refused(changed: dict[str, dict[str, object]], reason: str) -> None:
    """The error says what the recipe needs."""
    values = {node: {k: v for k, v in table.items() if v is not None} for node, table in changed.items()}
    base = Recipe.load("first_run")
    if values["model"]["use"] == "model.granite" and "head_dim" not in values["model"]:
        base = base.with_values({"unset": ["model.head_dim"]})
    with pytest.raises(UserError, match=reason):
        scale_width(base.with_values(values).graph, 2, "mup")
