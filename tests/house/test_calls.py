"""Arguments are passed one by one, not as a tuple, and by keyword if there are many."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from house.test_floors import ROOT, SOURCES

MAX_POSITIONAL = 6
"""Highest number of positional arguments in a call."""

EXCEPTIONS = {
    "components/data/store/processes.py": "a message over a pipe is a kind and the arguments of its handler",
}
"""Files with tuples as positional arguments, each with a reason."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
CHECKED = [path for path in SOURCES if path.relative_to(ROOT).parts[0] != "kernels"]
"""Kernels are excluded: their launches pass many strides and sizes."""


def find_unpacked(path: Path) -> Iterator[ast.Call]:
    """Yield calls that unpack a tuple into positional parameters of the project's functions and classes."""
    for call in find_calls(path):
        if any(isinstance(argument, ast.Starred) for argument in call.args) and is_variadic(path, call) is False:
            yield call


def find_long(path: Path) -> Iterator[ast.Call]:
    """Yield calls with too many positional arguments, unless the callee accepts any number."""
    for call in find_calls(path):
        if len(call.args) > MAX_POSITIONAL and not is_variadic(path, call):
            yield call


def find_calls(path: Path) -> list[ast.Call]:
    """Return the calls in a file."""
    return [node for node in ast.walk(tree(path)) if isinstance(node, ast.Call)]


@cache
def tree(path: Path) -> ast.Module:
    """Return a file's syntax tree."""
    return ast.parse(path.read_text("utf-8"))


def is_variadic(path: Path, call: ast.Call) -> bool | None:
    """Return whether the callee has a parameter `*args`, or None for unknown callees and other projects."""
    match call.func:
        case ast.Name(name):
            callees = find_definitions(path).get(name) or [
                callee
                for source in find_import_sources(path, name)
                for callee in find_definitions(source).get(name, ())
            ]
        case ast.Attribute(attr=name):
            # The object's type is unknown: consider all of the project's methods with this name.
            callees = find_methods().get(name, []) if name not in LIBRARY_METHODS else []
        case _:
            callees = []
    return any(callees) if callees else None


LIBRARY_METHODS = {"add", "apply", "empty", "finish", "format", "range", "union", "update", "view", "warning"}
"""Library methods with the same names as methods of the project."""


def find_import_sources(path: Path, name: str) -> list[Path]:
    """Return the project's files from which a file imports a name."""
    froms = [node for node in ast.walk(tree(path)) if isinstance(node, ast.ImportFrom)]
    modules = [node.module or "" for node in froms if name in [item.asname or item.name for item in node.names]]
    paths = [ROOT / f"{module.removeprefix('drawloom.').replace('.', '/')}.py" for module in modules]
    return [source for source in paths if source.is_file()]


@cache
def find_definitions(path: Path) -> dict[str, list[bool]]:
    """Return whether a file's functions and classes have `*args`: name -> one flag per definition."""
    variadic_by_name: dict[str, list[bool]] = {}
    for node in ast.walk(tree(path)):
        if isinstance(node, Function):
            variadic_by_name.setdefault(node.name, []).append(node.args.vararg is not None)
        elif isinstance(node, ast.ClassDef):
            makers = [item for item in node.body if isinstance(item, Function) and item.name in ("__init__", "__new__")]
            variadic_by_name.setdefault(node.name, []).append(any(maker.args.vararg for maker in makers))
    return variadic_by_name


@cache
def find_methods() -> dict[str, list[bool]]:
    """Return whether the project's methods have `*args`: name -> one flag per definition."""
    variadic_by_name: dict[str, list[bool]] = {}
    for path in CHECKED:
        for owner in [node for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)]:
            for node in owner.body:
                if isinstance(node, Function):
                    variadic_by_name.setdefault(node.name, []).append(node.args.vararg is not None)
    return variadic_by_name


def test_no_tuple_is_unpacked_into_positional_parameters() -> None:
    """Arguments that travel together are keywords or a class, so that readers see the parameters' names."""
    wrong = [
        f"{path.relative_to(ROOT)}:{call.lineno}: {ast.unparse(call)[:100]}"
        for path in CHECKED
        for call in find_unpacked(path)
        if not is_excepted(path)
    ]
    assert not wrong, "\n".join(wrong)


def test_many_arguments_are_keywords() -> None:
    """A call has at most six positional arguments."""
    wrong = [
        f"{path.relative_to(ROOT)}:{call.lineno}: {ast.unparse(call)[:100]}"
        for path in CHECKED
        for call in find_long(path)
        if not is_excepted(path)
    ]
    assert not wrong, "\n".join(wrong)


def is_excepted(path: Path) -> bool:
    """Return whether a file is listed as an exception."""
    name = path.relative_to(ROOT).as_posix()
    return name in EXCEPTIONS


def test_calls_of_variadic_functions_are_not_reported(tmp_path: Path) -> None:
    """Calls of the project's functions and classes are reported unless the callee accepts any number of arguments."""
    path = tmp_path / "file.py"
    path.write_text(
        "class Pair: ...\ndef few(a, b): ...\ndef any_of(*parts): ...\n"
        "few(*x)\nany_of(*x)\nPair(*x)\nzip(*x)\nfew(1, 2, 3, 4, 5, 6, 7)\nany_of(1, 2, 3, 4, 5, 6, 7)\n"
    )
    assert [ast.unparse(call) for call in find_unpacked(path)] == ["few(*x)", "Pair(*x)"]
    assert [ast.unparse(call) for call in find_long(path)] == ["few(1, 2, 3, 4, 5, 6, 7)"]
