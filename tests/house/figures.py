"""
Figures of the source, `make figures`: lengths of functions and files, shares of comments and docstrings, and code that
is hard to follow. `python tests/house/figures.py --sites` prints where. `make figures ONLY=prose` lists the worst
sentences and names per file, `ONLY="prose components/loss"` in a folder.

"Code lines" are neither blank nor comments nor docstrings. A family's lines are its component's module: config, mapper
and table, without the mechanisms in `components/model/decoder/`. "Files per 1000 lines" leaves out __init__.py and
files that hold a component, whose name is its path. Docstrings count for public classes and functions; shapes count for
functions that accept or return a Tensor.
"""

import ast
import io
import re
import statistics
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

from house import budgets
from support import prose, structure
from support.imports import count_circles, module_name

ROOT = Path(__file__).parents[2]
FOLDERS = ("graph", "components", "kernels")
SHAPE = re.compile(r"\([a-z_0-9.* /+-]+,.*?\)|0-dimensional|scalar|any shape|\(\.\.\.")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def main() -> None:
    """Print a line per folder and one for all, or with `prose` the worst sentences per file."""
    if sys.argv[1:2] == ["prose"]:
        return _print_worst_sentences(sys.argv[2:] or prose.ROOMS)
    print(f"{'':<12}" + "".join(f"{head:>22}" for head in HEADS))
    for folders in (*((name,) for name in FOLDERS), FOLDERS):
        files = [path for name in folders for path in sorted((ROOT / name).rglob("*.py"))]
        print(f"{'all' if len(folders) > 1 else folders[0]:<12}" + "".join(f"{cell:>22}" for cell in measure(files)))
    paths = [path for name in FOLDERS for path in sorted((ROOT / name).rglob("*.py"))]
    texts = {module_name(path): path.read_text("utf-8") for path in paths}
    print(f"{'import circles':<22}{count_circles(texts):>6}")
    families = sorted(structure.family_lines({path: path.read_text("utf-8") for path in paths}).values())
    spread = f"{statistics.median(families):>6.0f} median, {families[-1]} at most, {len(families)} families"
    print(f"{'code lines per family':<22}{spread}")
    trees = {path: ast.parse(path.read_bytes()) for path in paths}
    for name, sites in SITES.items():
        where = sites(trees)
        print(f"{name:<22}{len(where):>6}", *(where if "--sites" in sys.argv[1:] else ()), sep="\n    ")
    for name, value in budgets.measure().items():
        print(f"{name:<45}{value:>9,}")
    counts = {room: prose.measure(prose.trees(room)) for room in prose.ROOMS}
    print(f"{'per 1000':<22}" + "".join(f"{room:>12}" for room in counts))
    for word in counts["graph"]:
        print(f"{word:<22}" + "".join(f"{count[word]:>12.1f}" for count in counts.values()))


def _print_worst_sentences(folders: Sequence[str]) -> None:
    for path in (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))):
        for sentence in prose.worst_sentences(ast.parse(path.read_bytes())):
            print(f"{path.relative_to(ROOT)}:{sentence}")


SITES = {
    "dimension literals": structure.dimension_literals,
    "undeclared attributes": structure.undeclared_attributes,
    "unpacked tuples": structure.unpacked_tuples,
}

HEADS = (
    "files",
    "lines",
    "code lines",
    "files per 1000 lines",
    "function p50/p90/max",
    "comments per 1000",
    "public docstrings",
    "shapes of tensors",
)


def measure(files: list[Path]) -> list[str]:
    """Return the cells of a line."""
    texts = {path: path.read_text("utf-8") for path in files}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    own = [path for path in files if path.name != "__init__.py" and "@component" not in texts[path]]
    lines = sum(text.count("\n") for text in texts.values())
    own_lines = sum(texts[path].count("\n") for path in own)
    functions = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, Function)]
    lengths = sorted((node.end_lineno or node.lineno) - node.lineno + 1 for node in functions)
    public = [node for tree in trees.values() for node in _public(tree)]
    tensors = [node for node in public if isinstance(node, Function) and _has_tensors(node)]
    comments = sum(_comments(text) for text in texts.values())
    return [
        str(len(files)),
        str(lines),
        str(sum(map(structure.code_lines, texts.values()))),
        f"{1000 * len(own) / own_lines:.1f}",
        f"{statistics.median(lengths):.0f}/{lengths[int(0.9 * len(lengths))]}/{lengths[-1]}",
        f"{1000 * comments / lines:.1f}",
        f"{_share([ast.get_docstring(node) is not None for node in public]):.0%}",
        f"{_share([bool(SHAPE.search(ast.get_docstring(node) or '')) for node in tensors]):.0%}",
    ]


def _public(tree: ast.Module) -> Iterator[Function | ast.ClassDef]:
    """Yield public functions, classes and methods."""
    for node in tree.body:
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
            yield node
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from (part for part in node.body if isinstance(part, Function) and not part.name.startswith("_"))


def _has_tensors(node: Function) -> bool:
    # Not TensorSpec and the like, which have no data.
    return any(re.search(r"\bTensor\b", ast.unparse(part)) for part in (node.args, node.returns) if part is not None)


def _comments(text: str) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type == tokenize.COMMENT and not _is_for_tools(token.string) for token in tokens)


def _is_for_tools(comment: str) -> bool:
    return comment.startswith(("# type:", "# noqa"))


def _share(flags: list[bool]) -> float:
    return sum(flags) / max(1, len(flags))


if __name__ == "__main__":
    main()
