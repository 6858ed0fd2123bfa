"""Overrides: words `node.key=value`, from the command line or from Python, as a table."""

import re
import shlex
from collections.abc import Sequence
from typing import Any

import tomli

from drawloom.graph.problems import COMMAND_LINE, Problem, RecipeError

QUOTED = re.compile(r"""["'](@[^"']+)["']""")
"""The name of a node in quotes, as a key in a file needs them."""


def read_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """
    Read overrides `node.key=value` into one table. Raises RecipeError with all malformed ones.

    A value without TOML syntax is a string: `kernels.rms_norm=eager`. After ".@", a key is the dotted name of a node,
    also in quotes: `edit.report.metrics.after.@metrics.learning=@metrics.mine`.
    """
    tree: dict[str, Any] = {}
    problems = []
    for word in overrides:
        key, equals, text = word.partition("=")
        path, at, name = QUOTED.sub(r"\1", key).partition(".@")
        *tables, last = [*path.split("."), f"@{name}"] if at else path.split(".")
        # A key without a dot would set a whole node, which only an inline table can be.
        if not (equals and last and all(tables)) or not (tables or text.lstrip().startswith("{")):
            problems.append(_make_problem(f"{word!r} is not an override", "write node.key=value"))
        elif isinstance(table := _get_or_create_table(tree, tables), str):
            problems.append(_make_problem(f"{key!r} is a key of {table!r}, which is set to a value"))
        else:
            try:
                # A newline would let the text define further keys.
                table[last] = tomli.loads(f"x = {text}")["x"] if "\n" not in text else text
            except (tomli.TOMLDecodeError, RecursionError, ValueError):
                table[last] = text
    if problems:
        raise RecipeError(problems)
    return tree


def _get_or_create_table(tree: dict[str, Any], path: Sequence[str]) -> dict[str, Any] | str:
    """Return the table at a path, created if necessary, or the part of the path with a value."""
    for part in path:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            return part
    return tree


def quote_override(text: str) -> str:
    """Return a word `node.key=value` as a shell accepts it."""
    return shlex.quote(text) if any(character in text for character in "[]{}\"*'$ ") else text


def nest_values(name: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return a node's values as nested tables, as a recipe has them: the node may be a member of a group."""
    for part in reversed(name.split(".")):
        values = {part: values}
    return values


def _make_problem(text: str, hint: str = "") -> Problem:
    return Problem("DL110", text, hint, position=COMMAND_LINE)
