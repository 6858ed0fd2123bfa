"""Modules do not import one another in circles, and class names are unique."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

from support.imports import find_circle, module_name

ROOT = Path(__file__).parents[2]
FLOORS = ("graph", "components", "kernels")
FILES = sorted(path for floor in FLOORS for path in (ROOT / floor).rglob("*.py"))


def test_modules_do_not_import_one_another_in_circles() -> None:
    """No module imports itself, directly or by other modules, at the top or inside a function."""
    assert find_circle({module_name(path): path.read_text("utf-8") for path in FILES}) == []


@pytest.mark.parametrize(
    ("text", "count"), [("import b", 3), ("from b import x", 3), ("def f():\n    import b", 3), ("import c", 0)]
)
def test_circle_is_found_at_any_depth(text: str, count: int) -> None:
    """An import circle is found at the top and inside functions; modules outside the project form no circle."""
    assert len(find_circle({"a": text, "b": "import a"})) == count


def test_public_class_names_are_unique() -> None:
    """Public classes of graph, components and kernels have different names, so that one search finds a class."""
    homes = defaultdict(list)
    for path in FILES:
        for node in ast.parse(path.read_bytes()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(path.relative_to(ROOT).as_posix())
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}
