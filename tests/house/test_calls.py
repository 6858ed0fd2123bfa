"""Arguments are passed one by one: no tuple stands for positional parameters, and many arguments have their names."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from house.test_floors import ROOT, SOURCES

MOST = 6
"""Positional arguments of a call; more of them are passed by keyword."""

OF_PEERS = {
    "components/data/store/processes.py": "a message over a pipe is a kind and the arguments of its handler",
}
"""Files with tuples as positional arguments, each with a reason."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
CHECKED = [path for path in SOURCES if path.relative_to(ROOT).parts[0] != "kernels"]
"""Kernels are launched with the strides and sizes of tensors."""


def find_unpacked(path: Path) -> Iterator[ast.Call]:
    """Yield the calls in a file that unpack into positional parameters of a function or class of the project."""
    for call in calls(path):
        if any(isinstance(argument, ast.Starred) for argument in call.args) and is_variadic(path, call) is False:
            yield call


def many(path: Path) -> Iterator[ast.Call]:
    """Yield the calls in a file with more positional arguments than may be, unless the callee takes any number."""
    for call in calls(path):
        if len(call.args) > MOST and not is_variadic(path, call):
            yield call


def calls(path: Path) -> list[ast.Call]:
    """Return the calls in a file."""
    return [node for node in ast.walk(tree(path)) if isinstance(node, ast.Call)]


@cache
def tree(path: Path) -> ast.Module:
    """Return a file's syntax tree."""
    return ast.parse(path.read_text("utf-8"))


def is_variadic(path: Path, call: ast.Call) -> bool | None:
    """Return whether the callee has a parameter `*args`; None for a callee outside of the project, or unknown."""
    match call.func:
        case ast.Name(name):
            callees = find_definitions(path).get(name) or [
                callee for source in imported(path, name) for callee in find_definitions(source).get(name, ())
            ]
        case ast.Attribute(attr=name):
            # The type of an object is unknown: its method is one of this name, if all of them are alike.
            callees = methods().get(name, []) if name not in OF_LIBRARIES else []
        case _:
            callees = []
    return any(callees) if callees else None


OF_LIBRARIES = {"add", "apply", "empty", "finish", "format", "range", "union", "update", "view", "warning"}
"""Methods of libraries, whose names methods of the project share."""


def imported(path: Path, name: str) -> list[Path]:
    """Return the file from which another imports a name, if it is the project's."""
    froms = [node for node in ast.walk(tree(path)) if isinstance(node, ast.ImportFrom)]
    modules = [node.module or "" for node in froms if name in [item.asname or item.name for item in node.names]]
    paths = [ROOT / f"{module.removeprefix('drawloom.').replace('.', '/')}.py" for module in modules]
    return [source for source in paths if source.is_file()]


@cache
def find_definitions(path: Path) -> dict[str, list[bool]]:
    """Return whether functions and classes take any number of arguments, by name."""
    found: dict[str, list[bool]] = {}
    for node in ast.walk(tree(path)):
        if isinstance(node, Function):
            found.setdefault(node.name, []).append(node.args.vararg is not None)
        elif isinstance(node, ast.ClassDef):
            makers = [item for item in node.body if isinstance(item, Function) and item.name in ("__init__", "__new__")]
            found.setdefault(node.name, []).append(any(maker.args.vararg for maker in makers))
    return found


@cache
def methods() -> dict[str, list[bool]]:
    """Return the same of all methods of the project."""
    found: dict[str, list[bool]] = {}
    for path in CHECKED:
        for owner in [node for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)]:
            for node in owner.body:
                if isinstance(node, Function):
                    found.setdefault(node.name, []).append(node.args.vararg is not None)
    return found


def test_no_tuple_is_unpacked_into_positional_parameters() -> None:
    """Arguments that travel together are keywords, or a class: a reader sees which parameter each is for."""
    wrong = [
        f"{path.relative_to(ROOT)}:{call.lineno}: {ast.unparse(call)[:100]}"
        for path in CHECKED
        for call in find_unpacked(path)
        if not is_excepted(path)
    ]
    assert not wrong, "\n".join(wrong)


def test_many_arguments_are_keywords() -> None:
    """Nobody counts to the seventh argument of a call."""
    wrong = [
        f"{path.relative_to(ROOT)}:{call.lineno}: {ast.unparse(call)[:100]}"
        for path in CHECKED
        for call in many(path)
        if not is_excepted(path)
    ]
    assert not wrong, "\n".join(wrong)


def is_excepted(path: Path) -> bool:
    """Return whether a file is being rewritten, or has a reason."""
    name = path.relative_to(ROOT).as_posix()
    return name in OF_PEERS


def test_calls_of_each_kind_are_told_apart(tmp_path: Path) -> None:
    """Functions and classes of the project count unless they take any number of arguments; others do not."""
    path = tmp_path / "file.py"
    path.write_text(
        "class Pair: ...\ndef few(a, b): ...\ndef any_of(*parts): ...\n"
        "few(*x)\nany_of(*x)\nPair(*x)\nzip(*x)\nfew(1, 2, 3, 4, 5, 6, 7)\nany_of(1, 2, 3, 4, 5, 6, 7)\n"
    )
    assert [ast.unparse(call) for call in find_unpacked(path)] == ["few(*x)", "Pair(*x)"]
    assert [ast.unparse(call) for call in many(path)] == ["few(1, 2, 3, 4, 5, 6, 7)"]
