"""Ports declare every attribute read from a component; nobody reads a name known only to the reader."""

import ast
from collections.abc import Iterator

from drawloom.graph import lifecycle
from drawloom.graph.testing.misspellings import capabilities
from drawloom.graph.types.port_match import find_members
from house.test_floors import ROOT, SOURCES

OF_OTHERS = {
    ("components/parallel/data_shard.py", "set_reduce_scatter_unused_params"): "a method of later releases of torch",
    ("components/ports/slices.py", "placements"): "DTensor, whose import takes a second",
}
"""Attributes of objects of libraries, by the file that reads them, each with a reason."""

LIFECYCLE = {
    name for cls in vars(lifecycle).values() if isinstance(cls, type) and hasattr(cls, "_is_protocol")
    for name in find_members(cls)
}  # fmt: skip


def find_undeclared(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each attribute read by a constant name, with or without a default."""
    tree = ast.parse(source)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    imported = {name.asname or name.name for node in imports for name in node.names}
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name("getattr" | "hasattr"), args=[owner, ast.Constant(str(name)), *_]):
                of_module = isinstance(owner, ast.Name) and owner.id in imported
                # Names with an underscore are those of the language, and internals of torch.
                if not of_module and not name.startswith("_"):
                    yield node.lineno, name


def test_no_component_is_read_by_an_undeclared_name() -> None:
    """What a component may have is a Protocol in components/ports/ or graph/lifecycle.py, and is tested with it."""
    wrong = [
        f"{path}:{line}: declare {name!r} in a runtime_checkable Protocol of components/ports/, and use isinstance"
        for path, line, name in _reads("components")
        if (path, name) not in OF_OTHERS
    ]
    assert not wrong, "\n".join(wrong)


def test_graph_calls_only_declared_methods() -> None:
    """The graph asks classes and objects only for methods of graph/lifecycle.py, and for what Python itself defines."""
    asked = {name for path, _, name in _reads("graph") if "cli/" not in path and "types/" not in path}
    assert asked - LIFECYCLE == {"cls"}  # of what the registry finds, a component or a problem
    assert LIFECYCLE - asked == set()


def test_exceptions_are_needed() -> None:
    """Each exception is an attribute still read by some file."""
    assert OF_OTHERS.keys() <= {(path, name) for path, _, name in _reads("components")}


def test_each_capability_is_asked_for() -> None:
    """A Protocol of an optional member that no source file tests would promise something that has no effect."""
    texts = [path.read_text("utf-8") for path in SOURCES]
    names = [cls.__name__ for cls in capabilities("drawloom.components.ports")]
    asked = [name for name in names if any(f", {name})" in text or f", {name}]" in text for text in texts)]
    assert sorted(names) == sorted(asked)


def test_constant_names_are_found() -> None:
    """Only constant names count, of objects other than modules, without those of the language."""
    source = 'import os\ngetattr(a, "b", 1)\nhasattr(os, "c")\nhasattr(a.d, "e")\ngetattr(a, f)\nhasattr(a, "__g__")\n'
    assert list(find_undeclared(source)) == [(2, "b"), (4, "e")]


def _reads(folder: str) -> Iterator[tuple[str, int, str]]:
    for path in SOURCES:
        relative = path.relative_to(ROOT)
        if relative.parts[0] == folder:
            for line, name in find_undeclared(path.read_text("utf-8")):
                yield relative.as_posix(), line, name
