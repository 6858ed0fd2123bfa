"""Ports declare every attribute that is read from a component by name."""

import ast
from collections.abc import Iterator
from functools import cache

from drawloom.graph import lifecycle
from drawloom.graph.testing.ports import find_capability_protocols
from drawloom.graph.types.port_match import list_protocol_members
from house.test_floors import ROOT, SOURCES

LIBRARY_ATTRIBUTES = {
    ("components/ports/slices.py", "placements"): "DTensor, whose import takes a second",
}
"""File and attribute of a library's object -> reason for the exception."""

LIFECYCLE = {
    name for cls in vars(lifecycle).values() if isinstance(cls, type) and hasattr(cls, "_is_protocol")
    for name in list_protocol_members(cls)
}  # fmt: skip


def find_undeclared(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and name of attributes that are read by a constant name, with or without a default."""
    tree = ast.parse(source)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    imported = {name.asname or name.name for node in imports for name in node.names}
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name("getattr" | "hasattr"), args=[owner, ast.Constant(str(name)), *_]):
                of_module = isinstance(owner, ast.Name) and owner.id in imported
                # Names with an underscore belong to Python or to torch's internals.
                if not of_module and not name.startswith("_"):
                    yield node.lineno, name


def test_components_are_read_only_by_declared_names() -> None:
    """Optional members of components are declared by a Protocol, and tested with isinstance."""
    wrong = [
        f"{path}:{line}: declare {name!r} in a runtime_checkable Protocol of components/ports/, and use isinstance"
        for path, line, name in _reads("components")
        if (path, name) not in LIBRARY_ATTRIBUTES
    ]
    assert not wrong, "\n".join(wrong)


def test_graph_calls_only_declared_methods() -> None:
    """The graph reads only methods that graph/lifecycle.py declares, and members of the language."""
    asked = {name for path, _, name in _reads("graph") if "cli/" not in path and "types/" not in path}
    assert asked - LIFECYCLE == {"cls"}  # the registry returns a component or a problem
    assert LIFECYCLE - asked == set()


def test_listed_exceptions_are_still_needed() -> None:
    """Every listed exception is still read by its file."""
    assert LIBRARY_ATTRIBUTES.keys() <= {(path, name) for path, _, name in _reads("components")}


def test_optional_protocols_are_used() -> None:
    """Some source file tests for every Protocol of an optional member; otherwise the member would have no effect."""
    texts = [path.read_text("utf-8") for path in SOURCES]
    names = [cls.__name__ for cls in find_capability_protocols("drawloom.components.ports")]
    asked = [name for name in names if any(f", {name})" in text or f", {name}]" in text for text in texts)]
    assert sorted(names) == sorted(asked)


def test_only_constant_public_names_are_reported() -> None:
    """Reads by a constant public name are reported, except reads from modules."""
    source = 'import os\ngetattr(a, "b", 1)\nhasattr(os, "c")\nhasattr(a.d, "e")\ngetattr(a, f)\nhasattr(a, "__g__")\n'
    assert list(find_undeclared(source)) == [(2, "b"), (4, "e")]


@cache
def _reads(folder: str) -> list[tuple[str, int, str]]:
    return [
        (path.relative_to(ROOT).as_posix(), line, name)
        for path in SOURCES
        if path.relative_to(ROOT).parts[0] == folder
        for line, name in find_undeclared(path.read_text("utf-8"))
    ]
