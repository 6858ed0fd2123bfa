"""Code blocks of a Markdown page, run as a reader would run them, on tiny recipes."""

import contextlib
import os
import re
import runpy
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
import pytest

from drawloom.graph.project import Project
from drawloom.graph.registry.registry import Registry
from support.runs import Outcome, command

ROOT = Path(__file__).parents[2]

FENCE = re.compile(r"^```(?P<language>\w*)(?: title=\"(?P<title>[^\"]+)\")?$")
MARKER = re.compile(r"^<!-- (?P<kind>not run|from|exit)(?:[: ]+(?P<value>.+?))? -->$")

# What a page trains takes seconds: models, batches and runs of the shipped recipes are made smaller. A row that no
# longer fits its recipe fails.
SMALLER = {
    "pretrain": [("length = 256", "length = 32"), ('context = "$vars.length"', 'context = "$vars.length"\ntokens = 8')],
    "first_run": [
        ("hidden_size = 192", "hidden_size = 16"),
        ("num_attention_heads = 6", "num_attention_heads = 2"),
        ("num_key_value_heads = 2", "num_key_value_heads = 1"),
        ("head_dim = 32", "head_dim = 8"),
        ("intermediate_size = 512", "intermediate_size = 32"),
        ("steps = 240", "steps = 12"),
        ('"data.standard_library"', '"data.text_files"\npaths = ["corpus/**/*.txt"]'),
    ],
    "finetune": [("steps = 50", "steps = 4")],
    "chat": [("steps = 30", "steps = 4")],
    "dpo": [('name = "dpo"', 'name = "dpo"\n\n[vars]\nlength = 192')],  # both answers of a pair fit
}
SIZES = {
    "steps": 4,
    "length": 192,  # both answers of a pair fit
    "global_size": 16,
    "warmup_tokens": 600,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 32,
}
SIZE = re.compile(rf"^({'|'.join(SIZES)}) = [\d_]+", re.MULTILINE)


@attrs.frozen
class Block:
    """A fenced block: its page and first line, its language, title and text, and the marker before it."""

    page: Path
    line: int
    language: str
    title: str
    text: str
    kind: str = ""
    value: str = ""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@attrs.frozen
class Command:
    """A command in a console block, and the output below it on the page."""

    words: str
    shown: list[str]


def blocks(page: Path) -> Iterator[Block]:
    """Yield a page's fenced blocks in order."""
    lines = page.read_text("utf-8").splitlines()
    marker, begin, opening = None, 0, None
    for number, line in enumerate(lines, 1):
        if opening is None and (opening := FENCE.match(line)):
            begin = number
        elif opening is not None and line == "```":
            text = "\n".join(lines[begin : number - 1]) + "\n"
            parts = opening["language"], opening["title"] or "", text
            kind, value = (marker["kind"], marker["value"] or "") if marker else ("", "")
            yield Block(page, begin, *parts, kind, value)
            marker, opening = None, None
        elif opening is None and line:
            marker = MARKER.match(line)


def read_files(page: Path) -> dict[str, str]:
    """Return the text of every file in a page, by its title."""
    return {block.title: block.text for block in blocks(page) if block.title}


def commands(block: Block) -> Iterator[Command]:
    """Yield the commands after `$ `, each with the lines up to the next one."""
    for part in re.split(r"^\$ ", block.text.replace("\\\n", ""), flags=re.MULTILINE)[1:]:
        first, *shown = part.splitlines()
        yield Command(first, shown)


def write_recipes(folder: Path) -> None:
    """Write the shipped recipes, with smaller training runs."""
    folder.mkdir()
    for path in (ROOT / "recipes").rglob("*.toml"):
        text = path.read_text("utf-8")
        for old, new in SMALLER.get(path.stem, ()):
            assert text.count(old) == 1, f"{path.name}: {old}"
            text = text.replace(old, new)
        (folder / path.name).write_text(text, "utf-8")


def shorten(recipe: str) -> str:
    """Return a page's recipe with a few steps and a small model."""
    return SIZE.sub(lambda match: f"{match[1]} = {SIZES[match[1]]}", recipe)


def run_words(folder: Path, words: Sequence[str], recipes: Path, path: str) -> Outcome:
    """
    Run `drawloom`, `python` or `pytest` with the small recipes, and packages in the folder `path` if there is one.

    In a process of its own, by `run_ranks`.
    """
    _use_recipes(recipes)
    if words[0] == "drawloom":
        return command(folder, words[1:], None, path)
    sys.path += [path] if path else []
    return _python(folder, words)


def run_source(folder: Path, source: str, recipes: Path) -> Outcome:
    """Run a Python block, and then its test functions; in a process of its own, by `run_ranks`."""
    _use_recipes(recipes)
    os.chdir(folder)
    with _capture_output(folder) as text:
        names = {"__name__": "__main__"}
        exec(compile(source, "block", "exec"), names)
        for name in [name for name in names if name.startswith("test_")]:
            names[name]()  # type: ignore[operator]
    return Outcome(0, text[0])


def _use_recipes(recipes: Path) -> None:
    own = Project(Registry.from_package("drawloom.components"), recipes)
    Project.from_package = classmethod(lambda cls, package: own)  # type: ignore[method-assign,assignment]


def _python(folder: Path, words: Sequence[str]) -> Outcome:
    os.chdir(folder)
    with _capture_output(folder) as text:
        if words[0] == "python":
            runpy.run_path(words[1], run_name="__main__")
            code = 0
        else:
            os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
            plugins = ["-p", "drawloom.pytest_plugin", "-p", "no:cacheprovider"]
            code = int(pytest.main([*plugins, *words[1:]]))
    return Outcome(code, text[0])


@contextlib.contextmanager
def _capture_output(folder: Path) -> Iterator[list[str]]:
    """Yield a list, which receives standard output in the end."""
    text = [""]
    with (folder / f"printed-{os.getpid()}").open("w+", encoding="utf-8") as file:
        with contextlib.redirect_stdout(file):
            yield text
        file.seek(0)
        text[0] = file.read()


def split_redirection(words: str) -> tuple[list[str], str]:
    """Return a command's words without its comment, and its output file."""
    parts = shlex.split(words, comments=True)
    return (parts[: parts.index(">")], parts[parts.index(">") + 1]) if ">" in parts else (parts, "")
