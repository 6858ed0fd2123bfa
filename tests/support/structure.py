"""Counts of constructs that make a source hard to follow, for `make figures`: sites by kind."""

import ast
import io
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]

DIMENSIONS = frozenset({"pipeline", "data_replicate", "data_shard", "context", "tensor", "expert"})
MESH_FILES = ("mesh.py", "mesh_layout.py", "planned.py")
BLANK = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def code_lines(text: str) -> int:
    """Return the number of code lines in a module: no blanks, comments and docstrings."""
    docstrings = {line for node in _docstrings(ast.parse(text)) for line in range(node.lineno, _end(node) + 1)}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in BLANK:
            lines |= {*range(token.start[0], token.end[0] + 1)}
    return len(lines - docstrings)


def tokens(text: str) -> int:
    """Return the number of a module's tokens without comments, docstrings, blank lines and indentation."""
    docstrings = {node.lineno for node in _docstrings(ast.parse(text))}
    read = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type not in BLANK and token.start[0] not in docstrings for token in read)


def family_lines(texts: Mapping[Path, str]) -> dict[str, int]:
    """Return the code lines by model family: by module with a component that has a class variable `config_type`."""
    return {
        ".".join(path.relative_to(ROOT / "components").with_suffix("").parts): code_lines(text)
        for path, text in texts.items()
        if any(_is_family(node) for node in ast.parse(text).body)
    }


def dimension_literals(trees: Mapping[Path, ast.Module]) -> list[str]:
    """Return where a dimension of the mesh is named by a string outside `components/parallel/` and the mesh itself."""
    sites = []
    for path, tree in trees.items():
        # In the format of states, "tensor" is the kind of a leaf.
        if not {"parallel", "storage"} & {*path.parts} and path.name not in MESH_FILES:
            sites += [_site(path, node) for node in ast.walk(tree) if _names_a_dimension(node)]
    return sites


def undeclared_attributes(trees: Mapping[Path, ast.Module]) -> list[str]:
    """Return where `getattr` or `hasattr` reads an optional attribute that no protocol declares."""
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    protocols = [node for node in nodes if isinstance(node, ast.ClassDef) and _is_protocol(node)]
    declared = {name for protocol in protocols for name in _members(protocol)}
    sites = []
    for path, tree in trees.items():
        modules = _list_imports(tree)
        for node in ast.walk(tree):
            read = _optional_read(node)
            if read is not None and read[0] not in modules and read[1] not in declared:
                sites.append(f"{_site(path, node)} {read[1]}")
    return sites


def unpacked_tuples(trees: Mapping[Path, ast.Module]) -> list[str]:
    """Return where a tuple is unpacked into positional parameters of our functions without `*`."""
    variadic: dict[str, set[bool]] = defaultdict(set)
    for tree in trees.values():
        for name, takes_all in _callables(tree):
            variadic[name].add(takes_all)
    return [
        f"{_site(path, node)} *{ast.unparse(argument.value)}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and variadic.get(_name_of_call(node)) == {False}
        for argument in node.args
        if isinstance(argument, ast.Starred) and isinstance(argument.value, ast.Name | ast.Attribute)
    ]


def _site(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"


def _docstrings(tree: ast.AST) -> Iterator[ast.Expr]:
    """Yield the string statements: docstrings of modules, classes, functions and constants."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node


def _end(node: ast.Expr) -> int:
    return node.end_lineno or node.lineno


def _is_family(node: ast.AST) -> bool:
    """Whether a statement defines a component with a class variable `family`."""
    if not isinstance(node, ast.ClassDef) or not node.decorator_list:
        return False
    return any(isinstance(part, ast.Assign) and ast.unparse(part.targets[0]) == "config_type" for part in node.body)


def _names_a_dimension(node: ast.AST) -> bool:
    """Whether a node is a call, an index or a comparison with the name of a dimension."""
    parts: Sequence[ast.AST] = ()
    if isinstance(node, ast.Call):
        parts = [*node.args, *(keyword.value for keyword in node.keywords)]
    elif isinstance(node, ast.Compare):
        parts = [node.left, *node.comparators]
    elif isinstance(node, ast.Subscript):
        parts = [node.slice]
    return any(isinstance(part, ast.Constant) and part.value in DIMENSIONS for part in parts)


def _is_protocol(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).split("[")[0] == "Protocol" for base in node.bases)


def _members(node: ast.ClassDef) -> Iterator[str]:
    for part in node.body:
        if isinstance(part, Function):
            yield part.name
        elif isinstance(part, ast.AnnAssign):
            yield ast.unparse(part.target)


def _list_imports(tree: ast.Module) -> set[str]:
    """Return the names bound by plain imports, such as `os`: their members differ by release or platform."""
    aliases = [alias for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    return {alias.asname or alias.name.split(".")[0] for alias in aliases}


def _optional_read(node: ast.AST) -> tuple[str, str] | None:
    """Return the object's first name and the attribute read by `getattr` with a default, or by `hasattr`."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return None
    if (node.func.id, len(node.args)) not in (("getattr", 3), ("hasattr", 2)):
        return None
    attribute = node.args[1]
    if not isinstance(attribute, ast.Constant) or str(attribute.value).startswith("__"):
        return None
    return ast.unparse(node.args[0]).split(".")[0], str(attribute.value)


def _callables(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """Yield function and class names, and whether they take any number of positional arguments."""
    for node in ast.walk(tree):
        if isinstance(node, Function):
            yield node.name, node.args.vararg is not None
        elif isinstance(node, ast.ClassDef):
            yield node.name, False


def _name_of_call(node: ast.Call) -> str:
    return ast.unparse(node.func).split(".")[-1]
