"""Pages of the commands, the shipped recipes, and the Python API."""

import contextlib
import io
import os
import re

import drawloom
from drawloom.graph.cli.main import main
from drawloom.graph.recipe.loading import RecipeFolder
from generate.catalogue import project

WIDTH = "88"
"""Columns of the help texts."""

RECIPES_HEAD = """\
# Recipes

The recipes that ship with drawloom. Run, extend or overlay them by name; recipes named `with_...` are overlays, for
`--overlay`.
"""

PYTHON_HEAD = """\
# Python

`import drawloom` has all that is public, with [`drawloom.ports`](../ports/index.md) for authors of components,
`drawloom.models` for authors of models, and `drawloom.testing` for tests. It loads torch only when something needs it.
"""

HOMES = {
    "Recipe": "graph.project",
    "Container": "graph.runtime.container",
    "ResolvedRecipe": "graph.recipe.lockfile",
    "Problem": "graph.problems",
    "Position": "graph.problems",
    "RecipeError": "graph.problems",
    "UserError": "graph.problems",
    "reward": "components.rewards.function",
    "tool": "components.environments.function_tool",
    "NodeView": "graph.wiring.node",
}
"""Where public classes are defined; the other names are of `graph.component`."""


def with_help(page: str) -> str:
    """Add the help text of every command to the end of its section on the page of commands."""
    head, *sections = re.split(r"^(?=## )", page, flags=re.MULTILINE)
    names = [section.removeprefix("## ").partition("\n")[0] for section in sections]
    return head + "".join(
        f"{section.rstrip()}\n\n```text\n{_help(name)}\n```\n\n" for name, section in zip(names, sections, strict=True)
    )


def _help(command: str) -> str:
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = WIDTH
    try:
        with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
            main([command, "--help"])
        return text.getvalue().strip()
    finally:
        del os.environ["COLUMNS"]
        if before is not None:
            os.environ["COLUMNS"] = before


def recipes_page() -> str:
    """The text of every shipped recipe."""
    paths = RecipeFolder(project().recipes).paths.values()
    return "\n".join([RECIPES_HEAD, *(f"## {path.stem}\n\n```toml\n{path.read_text('utf-8')}```\n" for path in paths)])


def python_page() -> str:
    """Directives for mkdocstrings: every public name of `drawloom`, `drawloom.models` and `drawloom.testing`."""
    from drawloom import models, testing

    names = [name for name in drawloom.__all__ if name not in ("models", "ports", "testing", "__version__")]
    names.sort(key=lambda name: (name != "Recipe", name not in HOMES, name))
    lines = [PYTHON_HEAD]
    for name in names:
        lines += _directive(f"drawloom.{HOMES.get(name, 'graph.component')}", "drawloom", name)
    for public in (models, testing):
        lines += [f"## {public.__name__}", ""]
        for name in public.__all__:
            lines += _directive(getattr(public, name).__module__, public.__name__, name)
    return "\n".join(lines)


def _directive(module: str, public: str, name: str) -> list[str]:
    """Where mkdocstrings finds a name, and under which people import it."""
    return [f"::: {module}.{name}", "    options:", f"      heading: {public}.{name}", ""]
