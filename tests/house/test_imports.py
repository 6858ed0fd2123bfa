"""Modules do not import one another in circles, and a class has a name of its own."""

import ast
from collections import defaultdict
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLOORS = ("graph", "components", "kernels")
FILES = sorted(path for floor in FLOORS for path in (ROOT / floor).rglob("*.py"))


def module_name(path: Path) -> str:
    """Return the name by which a file is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(["drawloom", *(parts[:-1] if parts[-1] == "__init__" else parts)])


def imports(text: str) -> set[str]:
    """Return the modules, and members of modules, that a module imports, at its top or inside of a function."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def find_circle(texts: Mapping[str, str]) -> list[str]:
    """Return modules of which each imports the next, and the last is the first; empty if there are none."""
    graph = {name: (imports(text) & texts.keys()) - {name} for name, text in texts.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


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
