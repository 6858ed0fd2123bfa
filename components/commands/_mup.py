"""
Maximal update parametrization (muP) as values of a recipe, for AdamW and for models with Granite's multipliers.

Yang et al. 2022, "Tensor Programs V", table 8: with m times the width, hidden matrices have 1/sqrt(m) times the initial
standard deviation and 1/m times the learning rate, the embedding has the same of both, and the head has 1/m times both.
One `initializer_range` serves all matrices, so embedding and head are scaled by multipliers instead, which is the same
for AdamW (section B.1): a factor c of an output with 1/c times the learning rate. Heads are added, and not widened, so
the scale of attention scores stays.
"""

import math
from collections.abc import Mapping
from typing import Any

from drawloom.graph import UserError
from drawloom.graph.toml.emit import dumps
from drawloom.graph.wiring.graph import Graph

Values = dict[str, dict[str, Any]]

WIDTHS = ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "logits_scaling")
HIDDEN = ["*_proj.weight"]


def scale_width(graph: Graph, multiple: int, parametrization: str) -> Values:
    """
    Return overlay values for a model `multiple` times as wide; "mup" also scales multipliers and learning rates.

    Raises UserError for a model without the multipliers, sizes from a file, or an optimizer with groups of its own.
    """
    model, optimizer = _find_scalable_model(graph), _find_adamw(graph)
    settings = graph.nodes[model].settings
    if missing := [name for name in (*WIDTHS, "head_dim") if not settings[name]]:
        raise UserError(f"[{model}] has no {missing[0]}; write all sizes of the narrowest model in the recipe", 2)
    wide: dict[str, Any] = {name: settings[name] * multiple for name in WIDTHS}
    if parametrization == "standard":
        return {model: wide}
    root = math.sqrt(multiple)
    is_tied = bool(settings["tie_word_embeddings"])
    wide |= {
        "tie_word_embeddings": is_tied,
        "initializer_range": (settings["initializer_range"] or 0.02) / root,
        "embedding_multiplier": (settings["embedding_multiplier"] or 1.0) * root,
        "attention_multiplier": settings["attention_multiplier"] or settings["head_dim"] ** -0.5,
        "logits_scaling": (settings["logits_scaling"] or 1.0) * root,
    }
    outer = ["*embed_tokens.weight", *([] if is_tied else ["*lm_head.weight"])]
    groups = [{"targets": HIDDEN, "lr_multiplier": 1 / multiple}, {"targets": outer, "lr_multiplier": 1 / root}]
    return {model: wide, optimizer: {"groups": groups}}


def format_overlay(values: Mapping[str, Mapping[str, Any]], comment: str) -> str:
    """Return values as a TOML overlay, below a comment with the text `comment`."""
    lines = [f"# {comment}"]
    for node, settings in values.items():
        lines += ["", f"[{node}]", *(f"{key} = {dumps(value)}" for key, value in settings.items())]
    return "\n".join(lines) + "\n"


def _find_scalable_model(graph: Graph) -> str:
    """Return the name of the only model node with widths and multipliers. Raises UserError."""
    names = [name for name, node in graph.nodes.items() if {*WIDTHS, *MULTIPLIERS} <= node.settings.keys()]
    if len(names) != 1:
        raise UserError(f"the recipe has {len(names)} models with muP's multipliers; write model.use=model.granite", 2)
    return names[0]


def _find_adamw(graph: Graph) -> str:
    """Return the name of the only optimizer node like AdamW. Raises UserError if there is none, or if it has groups."""
    names = [name for name, node in graph.nodes.items() if {"lr", "groups", "betas"} <= node.settings.keys()]
    if len(names) != 1 or graph.nodes[names[0]].settings["groups"]:
        fault = "has groups of its own" if names else "is missing"
        raise UserError(f"the recipe needs one optimizer like optim.adamw without groups, and it {fault}", 2)
    return names[0]
