"""Overrides: words of the form `node.key=value`, from the command line or from Python, as a table."""

import shlex
from collections.abc import Sequence
from typing import Any

import tomli

from drawloom.graph.problems import COMMAND_LINE, Problem, RecipeError


def read_overrides(words: Sequence[str]) -> dict[str, Any]:
    """
    Words of the form `node.key=value` as one table. Raises RecipeError with those that are not of this form.

    A value that is not TOML is a string: `kernels.rms_norm=eager`. From an "@" on, a key is the name of a node with its
    dots: `edit.report.metrics.after.@metrics.learning=@metrics.mine`.
    """
    tree: dict[str, Any] = {}
    problems = []
    for word in words:
        key, equals, text = word.partition("=")
        path, at, name = key.partition(".@")
        *tables, last = [*path.split("."), f"@{name}"] if at else path.split(".")
        # A key without a dot would set a whole node, which only an inline table can be.
        if not (equals and last and all(tables)) or not (tables or text.lstrip().startswith("{")):
            problems.append(_problem(f"{word!r} is not understood", "values are set by node.key=value"))
        elif isinstance(table := _open_table(tree, tables), str):
            problems.append(_problem(f"{key!r} goes into {table!r}, which is set to a value"))
        else:
            try:
                # A newline would let the text define further keys.
                table[last] = tomli.loads(f"x = {text}")["x"] if "\n" not in text else text
            except (tomli.TOMLDecodeError, RecursionError, ValueError):
                table[last] = text
    if problems:
        raise RecipeError(problems)
    return tree


def _open_table(tree: dict[str, Any], path: Sequence[str]) -> dict[str, Any] | str:
    """The table at a path, made if necessary; or the part of the path that is a value."""
    for part in path:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            return part
    return tree


def quote_word(text: str) -> str:
    """Return a word of the form `node.key=value` as it is written in a shell."""
    return shlex.quote(text) if any(character in text for character in "[]{}\"*'$ ") else text


def nest_values(name: str, values: dict[str, Any]) -> dict[str, Any]:
    """The values of a node as a recipe has them: the node may be a member of a group."""
    for part in reversed(name.split(".")):
        values = {part: values}
    return values


def _problem(text: str, hint: str = "") -> Problem:
    return Problem("DL110", text, hint, position=COMMAND_LINE)
