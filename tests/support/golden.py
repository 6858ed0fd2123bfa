"""
Golden recipes and the output of `drawloom check` for them, as a user sees it.

Files in `tests/golden/faulty` are blocks: a line `=== name`, a recipe, `--- ` and its output. Blocks in `bases.txt`
are recipes that others extend.
"""

import contextlib
import io
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import attrs

from drawloom.graph.cli.main import main, split_off_overrides
from drawloom.graph.inspect.resolved import make_resolved_recipe
from drawloom.graph.problems import RecipeError
from drawloom.graph.project import Project

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
FAULTY, GOOD = GOLDEN / "faulty", GOLDEN / "good"


@attrs.frozen
class Block:
    """A recipe in `tests/golden/faulty`; `output` is empty if others extend it."""

    name: str
    recipe: str
    output: str


def read_blocks(file: Path) -> list[Block]:
    """Return a file's blocks."""
    texts = file.read_text("utf-8").removeprefix("=== ").split("\n\n=== ")
    heads = [text.rstrip("\n").partition("\n") for text in texts]
    recipes = [(name, *f"{text}\n".partition("--- ")) for name, _, text in heads]
    return [Block(name, recipe, output) for name, recipe, _, output in recipes]


def write_blocks(file: Path, blocks: list[Block]) -> None:
    """Write a file's blocks."""
    texts = [f"=== {block.name}\n{block.recipe}--- {block.output}" for block in blocks]
    file.write_text("\n".join(texts), "utf-8")


@cache
def read_faulty() -> dict[str, Block]:
    """Return all faulty recipes with an output, by name."""
    blocks = [block for file in sorted(FAULTY.glob("*.txt")) for block in read_blocks(file)]
    return {block.name: block for block in blocks if block.output}


def write_faulty(folder: Path) -> Path:
    """Write the faulty recipes and their bases to a new folder, and return it."""
    (folder / "bases" / "folder.toml").mkdir(parents=True)
    (folder / "bases" / "link.toml").symlink_to(ROOT / "README.md")
    for block in (*read_faulty().values(), *read_blocks(FAULTY / "bases.txt")):
        (folder / f"{block.name}.toml").write_text(block.recipe, "utf-8")
    return folder


def run_check(recipe: Path) -> str:
    """
    Return the exit code, and the text written to stderr and stdout, in which `$ROOT` is this repository.

    First lines such as `# project: shop` and `# arguments: clip.max_norm=0` name another project than drawloom's and
    give the rest of the command line.
    """
    stdout, stderr = io.StringIO(), io.StringIO()
    with _beside(recipe), contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(stdout):
        try:
            code = main(["check", recipe.name, *_directive(recipe, "arguments").split()], project_of(recipe))
        except SystemExit as error:  # words that are no arguments
            code = int(error.code or 0)
        printed = stderr.getvalue() + stdout.getvalue()
        printed = printed.replace(os.path.relpath(ROOT), "$ROOT")
    return f"exit {code}\n{printed}"


def resolve_recipe(recipe: Path) -> str:
    """Return the resolved text of a valid recipe."""
    project, words = project_of(recipe), split_off_overrides(_directive(recipe, "arguments").split())[1]
    with _beside(recipe):
        graph = project.graph(project.load(recipe.name, overrides=words))
        if graph.problems:
            raise RecipeError(graph.problems)
        return make_resolved_recipe(graph).text


def project_of(recipe: Path) -> Project:
    """Return the project of a recipe."""
    return Project.from_package({"": "drawloom", "shop": "support.shop"}[_directive(recipe, "project")])


def _directive(recipe: Path, name: str) -> str:
    match = re.search(f"^# {name}: (.*)", recipe.read_bytes()[:200].decode("utf-8", "replace"), re.MULTILINE)
    return match[1] if match else ""


@contextlib.contextmanager
def _beside(recipe: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(recipe.parent)
    try:
        yield
    finally:
        os.chdir(before)
