"""The house speaks the field's language: old words of words.toml stand nowhere any more."""

import ast
import io
import re
import tokenize
import tomllib
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import attrs

ROOT = Path(__file__).parents[2]
TABLE = tomllib.loads((Path(__file__).parent / "words.toml").read_text("utf-8"))["group"]
SOURCES = ("graph", "components", "kernels", "recipes", "tests", "docs")
FROZEN = ("tests/golden/checkpoints/", "tests/house/words.toml", "tests/house/test_words.py")
"""Checkpoints of older formats say what they said; the table says what is old."""

THEIRS = {"ProcessGroup"}
"""Old names that other libraries have, too."""

SETTING = re.compile(r"^\s*([\w.]+)\s*=(?!=)")
HEADER = re.compile(r"^\s*\[\[?([\w.]+)\]\]?")


@attrs.frozen
class Row:
    """A word that is out of use in some files, and what stands in its place."""

    group: str
    kind: str
    where: tuple[str, ...]
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.kind} {self.old}"


ROWS = [
    Row(group["name"], group["kind"], tuple(row.get("where", group["where"])), row["old"], row["new"])
    for group in TABLE
    for row in group["rows"]
    if group["active"]
]


@cache
def files() -> dict[str, str]:
    """Every text file that is written by people, by its path below the root."""
    paths = [
        path for folder in SOURCES for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".toml", ".md")
    ]
    paths += [path for path in ROOT.glob("*.md") if path.name != "CHANGELOG.md"]
    found = {path.relative_to(ROOT).as_posix(): path for path in paths if path.is_file()}
    return {name: path.read_text("utf-8") for name, path in found.items() if not name.startswith(FROZEN)}


def in_scope(row: Row, *parts: str) -> Iterator[tuple[str, str]]:
    """The files that a row speaks of and that hold one of these."""
    for name, text in files().items():
        if any(part in text for part in parts) and any(g == "**" or fnmatch(name, g) for g in row.where):
            yield name, text


@cache
def tokens(name: str) -> list[tuple[int, int, str]]:
    """Line, kind and text of every name, string and comment of a Python file."""
    wanted = (tokenize.NAME, tokenize.STRING, tokenize.COMMENT)
    read = tokenize.generate_tokens(io.StringIO(files()[name]).readline)
    return [(token.start[0], token.type, token.string) for token in read if token.type in wanted]


@cache
def texts(name: str) -> list[tuple[int, str]]:
    """The lines of a document or recipe; of Python its strings and comments alone."""
    if not name.endswith(".py"):
        return list(enumerate(files()[name].splitlines(), 1))
    parts = [(line, text) for line, kind, text in tokens(name) if kind != tokenize.NAME]
    return [(first + number, line) for first, text in parts for number, line in enumerate(text.splitlines())]


def search(name: str, pattern: str) -> Iterator[str]:
    """Where a text matches."""
    return (f"{name}:{line}: {text.strip()[:100]}" for line, text in texts(name) if re.search(pattern, text))


def identifiers(name: str, word: str) -> Iterator[str]:
    """Where a Python file has a name."""
    found = tokens(name) if name.endswith(".py") else []
    return (f"{name}:{line}: {text}" for line, kind, text in found if kind == tokenize.NAME and text == word)


def modules(row: Row) -> Iterator[str]:
    """A file or room that is there, or is named by path or with dots."""
    old, new = row.old.removesuffix("/*"), row.new.removesuffix("/*")
    for path in (ROOT / f"{old}.py", ROOT / f"{old}.toml"):
        if path.exists():
            yield str(path.relative_to(ROOT))
    if new.startswith(f"{old}/"):  # a room that has the file's name
        return
    dotted = re.escape(old.replace("/", "."))
    for name, _ in in_scope(row, old, old.replace("/", ".")):
        yield from search(name, rf"(?<![\w/.]){re.escape(old)}(\.py|/)|drawloom\.{dotted}(?!\w)")
        if name.endswith(".py") and f"drawloom.{old.replace('/', '.')}" in files()[name]:
            lines = enumerate(files()[name].splitlines(), 1)
            yield from (f"{name}:{n}: {line}" for n, line in lines if re.search(rf"drawloom\.{dotted}(?!\w)", line))


def settings(row: Row) -> Iterator[str]:
    """A key below its table, or a dotted path on a command line."""
    node, _, key = row.old.rpartition(".")
    for name, _ in in_scope(row, row.old, f"[{node}]"):
        yield from search(name, rf"(?<![\w./@-]){re.escape(row.old)}(?=\s*=|`|\]|$)")
        table = ""
        for line, text in texts(name):
            if header := HEADER.match(text):
                table = header[1]
            elif table == node and (written := SETTING.match(text)) and written[1] == key:
                yield f"{name}:{line}: {text.strip()}"


def nodes(row: Row) -> Iterator[str]:
    """A table, or a reference to one."""
    old = re.escape(row.old)
    for name, _ in in_scope(row, row.old):
        yield from search(name, rf"^\s*\[{old}(\.\w+)?\]|\"@{old}(\.[\w*]+)?\"")


def words(row: Row) -> Iterator[str]:
    """An identifier or a word of a text."""
    for name, _ in in_scope(row, row.old):
        yield from identifiers(name, row.old)
        yield from search(name, rf"(?<!\w){re.escape(row.old)}(?!\w)")


def symbols(row: Row) -> Iterator[str]:
    """What a module or a class of it defines; a class of several words wherever it is used."""
    module, _, path = row.old.partition(":")
    file = f"{module.replace('.', '/')}.py"
    if file in files():
        tree: Any = ast.parse(files()[file])
        for part in path.split("."):
            tree = next((node for node in getattr(tree, "body", []) if part in defined(node)), None)
        if tree is not None:
            yield f"{file}:{tree.lineno}: {path}"
    if re.fullmatch(r"[A-Z]\w*[a-z][A-Z]\w*", path) and path not in THEIRS:
        for name, _ in in_scope(row, path):
            yield from identifiers(name, path)


def defined(node: ast.AST) -> Iterable[str]:
    """The names that a statement gives."""
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return (name,)
        case ast.AnnAssign(target=ast.Name(id=name)):
            return (name,)
        case ast.Assign(targets=targets):
            return [target.id for target in targets if isinstance(target, ast.Name)]
    return ()


def phrases(row: Row) -> Iterator[str]:
    """What is said in words of our own."""
    pattern = rf"(?i)\b{re.escape(row.old)}\b"
    for name, text in in_scope(row, ""):
        if re.search(pattern, text):  # to go through lines takes longer
            yield from search(name, pattern)


KINDS = {
    "module": modules,
    "setting": settings,
    "node": nodes,
    "word": words,
    "symbol": symbols,
    "phrase": phrases,
}


def test_an_old_word_is_used_nowhere() -> None:
    """What the field has a word for is called by it, in code, text and recipes."""
    found = {(row, place) for row in ROWS for place in KINDS[row.kind](row)}
    assert not found, "\n".join(sorted(f"{row}: write {row.new!r}: {place}" for row, place in found))


def test_every_row_is_of_a_kind_that_is_tested() -> None:
    """A group with a misspelt kind would be refused by nothing."""
    assert {group["kind"] for group in TABLE} <= KINDS.keys()
    assert len({(row.kind, row.old) for row in ROWS}) == len(ROWS)
