"""What `drawloom check` prints for a recipe, as a person would see it."""

import contextlib
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path

from drawloom.graph.cli.main import main
from drawloom.graph.cli.project import Project
from drawloom.graph.problems import RecipeError
from drawloom.graph.recipe.resolving import resolve

GOLDEN = Path(__file__).parents[1] / "golden"
FAULTY, GOOD = GOLDEN / "faulty", GOLDEN / "good"


def printed(recipe: Path) -> str:
    """
    The exit code, what went to stderr, and what went to stdout.

    First lines such as `# workshop: shop` and `# arguments: clip.max_norm=0` name another workshop than drawloom's
    and give the rest of the command line.
    """
    said, told = io.StringIO(), io.StringIO()
    with _beside(recipe), contextlib.redirect_stderr(told), contextlib.redirect_stdout(said):
        try:
            code = main(["check", recipe.name, *_directive(recipe, "arguments").split()], workshop_of(recipe))
        except SystemExit as error:  # words that are no arguments
            code = int(error.code or 0)
    return f"exit {code}\n{told.getvalue()}{said.getvalue()}"


def resolved(recipe: Path) -> str:
    """The resolved recipe of one that is good."""
    workshop, words = workshop_of(recipe), _directive(recipe, "arguments").split()
    with _beside(recipe):
        graph = workshop.graph(workshop.load(recipe.name, words=words))
        if graph.problems:
            raise RecipeError(graph.problems)
        return resolve(graph).text


def workshop_of(recipe: Path) -> Project:
    """The workshop that a recipe is for."""
    return Project.of({"": "drawloom", "shop": "support.shop"}[_directive(recipe, "workshop")])


def _directive(recipe: Path, name: str) -> str:
    found = re.search(f"^# {name}: (.*)", recipe.read_bytes()[:200].decode("utf-8", "replace"), re.MULTILINE)
    return found[1] if found else ""


@contextlib.contextmanager
def _beside(recipe: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(recipe.parent)
    try:
        yield
    finally:
        os.chdir(before)
