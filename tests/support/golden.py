"""The output of `drawloom check` for a recipe, as a user sees it."""

import contextlib
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path

from drawloom.graph.cli.main import main, split_off_overrides
from drawloom.graph.inspect.changes import make_resolved_recipe
from drawloom.graph.problems import RecipeError
from drawloom.graph.project import Project

GOLDEN = Path(__file__).parents[1] / "golden"
FAULTY, GOOD = GOLDEN / "faulty", GOLDEN / "good"


def run_check(recipe: Path) -> str:
    """
    Return the exit code, and the text written to stderr and stdout.

    First lines such as `# project: shop` and `# arguments: clip.max_norm=0` name another project than drawloom's and
    give the rest of the command line.
    """
    stdout, stderr = io.StringIO(), io.StringIO()
    with _beside(recipe), contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(stdout):
        try:
            code = main(["check", recipe.name, *_directive(recipe, "arguments").split()], project_of(recipe))
        except SystemExit as error:  # words that are no arguments
            code = int(error.code or 0)
    return f"exit {code}\n{stderr.getvalue()}{stdout.getvalue()}"


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
