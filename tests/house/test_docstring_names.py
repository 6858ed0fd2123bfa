"""Methods in class docstrings exist."""

import ast
import re
from collections.abc import Iterator, Mapping
from itertools import chain

from house.test_floors import SOURCES

NAME = re.compile(r"`(?:([A-Z]\w*)\.)?([a-z]\w*?_\w+)[`(]")
"""A method with a name of several words, perhaps after its class; one word may be anything."""


def _find_misnamed(modules: list[ast.Module]) -> Iterator[str]:
    """Yield class and name for methods in class docstrings without a definition in this class or the named one."""
    nodes = [node for module in modules for node in ast.walk(module)]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    by_name: dict[str, list[ast.ClassDef]] = {}
    for node in classes:
        by_name.setdefault(node.name, []).append(node)
    # Settings and keys of metrics may have the name of a method.
    others = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    others |= {ast.unparse(node.target) for node in nodes if isinstance(node, ast.AnnAssign)}
    methods = {part.name for node in classes for part in node.body if isinstance(part, ast.FunctionDef)} - others
    for node in classes:
        for owner, name in NAME.findall(ast.get_docstring(node) or ""):
            owners = by_name.get(owner, []) if owner else [node]
            is_known = owner in by_name if owner else name in methods
            if is_known and not any(name in _list_members(own, by_name) for own in owners):
                yield f"{node.name}: {owner}.{name}" if owner else f"{node.name}: {name}"


def _list_members(node: ast.ClassDef, by_name: Mapping[str, list[ast.ClassDef]]) -> set[str]:
    """Return the names in a class and its bases, parameters of methods included."""
    members = set[str]()
    for part in ast.walk(node):
        match part:
            case ast.FunctionDef(name=name) | ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                members.add(name)
            case ast.Attribute(attr=name, value=ast.Name(id="self")):
                members.add(name)
    bases = (ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases)
    inherited = chain.from_iterable(by_name.get(base, []) for base in bases if base != node.name)
    return members.union(*(_list_members(base, by_name) for base in inherited))


def test_methods_in_class_docstrings_exist() -> None:
    """A class docstring names its own methods, or another class's as `Class.method`."""
    assert [*_find_misnamed([ast.parse(path.read_text()) for path in SOURCES])] == []


def test_a_wrong_name_is_found() -> None:
    """Another class's method, without its class, is found, and a member that a class lacks."""
    text = '''
class First:
    """Calls `run_now`, `Second.run_now` and `Second.run_later(1)`, with `Other.run_now`."""
class Second:
    """Calls `run_now`."""
    def run_now(self): ...
class Third(Second):
    """Calls `run_now`; sets `some_key`."""
'''
    assert [*_find_misnamed([ast.parse(text)])] == ["First: run_now", "First: Second.run_later"]
