"""Values from the command line: `node.key=value`, `--node.key value`, `--node.key=value`."""

from collections.abc import Sequence
from typing import Any

import tomli

from drawloom.graph.problems import COMMAND_LINE, Problem, RecipeError


def read_overrides(words: Sequence[str]) -> dict[str, Any]:
    """
    The words that a command did not know, as one table; a RecipeError that lists those that are no override.

    A value that is not TOML is a string: `kernels.rms_norm=eager`.
    """
    tree: dict[str, Any] = {}
    problems = [problem for key, value in _pairs(words) if (problem := _put(tree, key, value))]
    if problems:
        raise RecipeError(problems)
    return tree


def _pairs(words: Sequence[str]) -> list[tuple[str, str | None]]:
    pairs: list[tuple[str, str | None]] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        key, equals, value = word.removeprefix("--").partition("=")
        if equals:
            pairs.append((key, value))
        elif word.startswith("--") and "." in word and rest:
            pairs.append((key, rest.pop(0)))
        else:
            pairs.append((word, None))
    return pairs


def _put(tree: dict[str, Any], key: str, value: str | None) -> Problem | None:
    parts = key.split(".")
    if value is None or not all(parts) or (len(parts) == 1 and not value.lstrip().startswith("{")):
        text = f"{key if value is None else f'{key}={value}'!r} is not understood"
        return Problem("DL110", text, "values are set by node.key=value", place=COMMAND_LINE)
    for part in parts[:-1]:
        below = tree.setdefault(part, {})
        if not isinstance(below, dict):
            return Problem("DL110", f"{key!r} goes into {part!r}, which is set to a value", place=COMMAND_LINE)
        tree = below
    tree[parts[-1]] = _value(value)
    return None


def _value(text: str) -> Any:
    try:
        return tomli.loads(f"x = {text}")["x"] if "\n" not in text else text
    except (tomli.TOMLDecodeError, RecursionError, ValueError):
        return text
