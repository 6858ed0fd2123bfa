"""A ladder's sizes as recipe values."""

import pytest
import tomli

from drawloom.components.commands.planning.ladder import format_overlay, make_scaled_model_overlay
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
}
BASE = {"use": "model.parametrization.mup", "base_hidden_size": 16}


def recipe(**model: object) -> Recipe:
    """Return the first recipe with a small Granite."""
    return Recipe.load("first_run").with_values({"model": {**SIZES, **model}})


def test_width_grows_by_heads_and_depth_by_layers() -> None:
    """The overlay has sizes and the parametrization's base, and its recipe no problems."""
    wide, deep = (
        make_scaled_model_overlay(recipe().graph, 4, "width", "mup"),
        make_scaled_model_overlay(recipe().graph, 3, "depth", "completep"),
    )
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 128}
    assert wide == {"model": {**sizes, "parametrization": BASE}}
    completep = {"use": "model.parametrization.completep", "base_hidden_size": 16, "base_num_hidden_layers": 1}
    assert deep == {"model": {"num_hidden_layers": 3, "parametrization": completep}}
    assert make_scaled_model_overlay(recipe().graph, 4, "width", "standard") == {"model": sizes}
    for values in (wide, deep):
        assert tomli.loads(format_overlay(values, "a size")) == values
        recipe().with_values(values).check(skip_machine_checks=True)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"model": {"use": "model.qwen3.moe"}}, "write use = model.granite, model.llama or model.qwen3.dense"),
        ({"model": SIZES, "unset": ["model.head_dim"]}, "has no head_dim"),
        ({"model": {**SIZES, "parametrization": BASE}}, "ladder adds itself"),
    ],
)
def test_other_recipes_are_refused(changed: dict[str, object], reason: str) -> None:
    """The error says what the recipe needs."""
    model = {key: value for key, value in SIZES.items() if key != "head_dim"} if "unset" in changed else None
    graph = Recipe.load("first_run").with_values(changed | ({"model": model} if model else {})).graph
    with pytest.raises(UserError, match=reason):
        make_scaled_model_overlay(graph, 2, "width", "mup")
