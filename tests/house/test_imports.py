"""Modules do not import one another in circles, and a class has a name of its own."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

from support.imports import find_circle, module_name

ROOT = Path(__file__).parents[2]
FLOORS = ("graph", "components", "kernels")
FILES = sorted(path for floor in FLOORS for path in (ROOT / floor).rglob("*.py"))


def test_no_modules_import_one_another_in_a_circle() -> None:
    """No module imports another that imports it, directly or not, at the top or inside of a function."""
    assert find_circle({module_name(path): path.read_text("utf-8") for path in FILES}) == []


@pytest.mark.parametrize(
    ("text", "count"), [("import b", 3), ("from b import x", 3), ("def f():\n    import b", 3), ("import c", 0)]
)
def test_a_circle_is_found(text: str, count: int) -> None:
    """A circle is found wherever the import is written; modules that are not asked about form none."""
    assert len(find_circle({"a": text, "b": "import a"})) == count


def test_public_class_names_are_unique() -> None:
    """Two public classes of graph, components and kernels do not share a name, so that one search finds a class."""
    homes = defaultdict(list)
    for path in FILES:
        for node in ast.parse(path.read_bytes()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(path.relative_to(ROOT).as_posix())
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}
