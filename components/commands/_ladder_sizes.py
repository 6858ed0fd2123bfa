"""A ladder's sizes and parametrization as recipe values, for dense models with an edge `parametrization`."""

from collections.abc import Mapping
from typing import Any, Literal

from drawloom.components.ports.parameter_roles import Parametrization
from drawloom.graph import UserError
from drawloom.graph.toml.emit import dump_toml
from drawloom.graph.wiring.graph import Graph

Values = dict[str, dict[str, Any]]
Dimension = Literal["width", "depth"]

WIDTHS = ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
DEPTH = "num_hidden_layers"
SCALED = {"width": WIDTHS, "depth": (DEPTH,)}
EDGE = "parametrization"


def make_scaled_model_overlay(graph: Graph, multiple: int, dimension: Dimension, parametrization: str) -> Values:
    """
    Return overlay values for a model `multiple` times as wide or deep, with the recipe's model as the base.

    Width grows by heads. `parametrization` is "mup", "completep" or "standard". Raises UserError for sizes from a file,
    for another model, and for a recipe with a parametrization.
    """
    model = _find_model_node_accepting_parametrization(graph)
    settings = graph.nodes[model].settings
    if missing := [name for name in (*WIDTHS, "head_dim", DEPTH) if not settings[name]]:
        raise UserError(f"[{model}] has no {missing[0]}; write all sizes of the smallest model in the recipe", 2)
    if existing := graph.implementers(Parametrization):
        raise UserError(f"the recipe has [{existing[0]}], which ladder adds itself; remove it", 2)
    sizes = {name: settings[name] * multiple for name in SCALED[dimension]}
    if parametrization == "standard":
        return {model: sizes}
    base = {"use": f"model.parametrization.{parametrization}", "base_hidden_size": settings["hidden_size"]}
    if parametrization == "completep":
        base["base_num_hidden_layers"] = settings[DEPTH]
    return {model: {**sizes, EDGE: base}}


def format_overlay(values: Mapping[str, Mapping[str, Any]], comment: str) -> str:
    """Return values as a TOML overlay, below a comment with the text `comment`."""
    lines = [f"# {comment}"]
    for node, settings in values.items():
        lines += ["", f"[{node}]", *(f"{key} = {dump_toml(value)}" for key, value in settings.items())]
    return "\n".join(lines) + "\n"


def _find_model_node_accepting_parametrization(graph: Graph) -> str:
    """Return the name of the only model node that accepts a parametrization. Raises UserError."""
    names = [
        name
        for name, node in graph.nodes.items()
        if any(field.name == EDGE for field in node.spec.edges) and {*WIDTHS, DEPTH} <= node.settings.keys()
    ]
    if len(names) != 1:
        remedy = "write use = model.granite, model.llama or model.qwen3.dense"
        raise UserError(f"the recipe has {len(names)} models that accept a parametrization; {remedy}", 2)
    return names[0]
