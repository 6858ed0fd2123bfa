"""What `drawloom check` prints for a recipe, as a person would see it."""

import contextlib
import io
import os
import re
from pathlib import Path

from drawloom.graph.cli import main

FAULTY = Path(__file__).parents[1] / "golden" / "faulty"


def printed(recipe: Path) -> str:
    """
    The exit code, what went to stderr, and what went to stdout.

    A first line such as `# arguments: clip.max_norm=0` gives the rest of the command line.
    """
    words = re.match(r"# arguments: (.*)", recipe.read_text("utf-8"))
    said, told = io.StringIO(), io.StringIO()
    before = Path.cwd()
    os.chdir(recipe.parent)
    try:
        with contextlib.redirect_stderr(told), contextlib.redirect_stdout(said):
            code = main(["check", recipe.name, *(words[1].split() if words else [])])
    finally:
        os.chdir(before)
    return f"exit {code}\n{told.getvalue()}{said.getvalue()}"
