"""Imports between modules of the source, for `make figures` and `tests/house/test_imports.py`."""

import ast
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]


def module_name(path: Path) -> str:
    """Return the name by which a file is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(["drawloom", *(parts[:-1] if parts[-1] == "__init__" else parts)])


def imports(text: str) -> set[str]:
    """Return the modules imported by a module, and their members, at its top or inside a function."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def find_circle(texts: Mapping[str, str]) -> list[str]:
    """Return modules each importing the next, the last one the first; empty without a circle."""
    graph = {name: (imports(text) & texts.keys()) - {name} for name, text in texts.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def count_circles(texts: Mapping[str, str]) -> int:
    """Return how many modules have to be removed until no circle is left, always taking a circle's first."""
    rest, count = dict(texts), 0
    while circle := find_circle(rest):
        del rest[circle[0]]
        count += 1
    return count
