"""Variables: what they are called where they are used, and which of them nobody uses."""

from collections.abc import Iterator
from typing import Any

from drawloom.graph.problems import Problem
from drawloom.graph.recipe.layers import Layer, Leaf
from drawloom.graph.toml.suggest import nearest

VARIABLE = "$vars."


def unused(variables: dict[str, Leaf], layers: list[Layer]) -> Iterator[Problem]:
    """A warning for each variable that no layer refers to, not even one that lies below another."""
    used = {name for layer in layers for name in _references(layer.data)} if variables else set()
    unknown = used - variables.keys()
    for name, leaf in variables.items():
        if name not in used:
            text = f"nothing refers to the variable {VARIABLE + name!r}"
            near = nearest(name, unknown)
            hint = f"did you mean {near!r}?" if near else ""
            yield Problem("DL116", text, hint, place=leaf.key_place, warning=True)


def _references(data: Any) -> Iterator[str]:
    stack = [data]
    while stack:
        part = stack.pop()
        if isinstance(part, str):
            if part.startswith(VARIABLE):
                yield part.removeprefix(VARIABLE)
        elif isinstance(part, dict):
            stack += part.values()
        elif isinstance(part, list):
            stack += part
