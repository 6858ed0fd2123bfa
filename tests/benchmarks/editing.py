"""Cost of a keystroke in a recipe: from the changed text to the language server's diagnostics."""

import os
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

from drawloom.graph.lsp.diagnostics import diagnose
from drawloom.graph.lsp.workspace import Workspace
from drawloom.graph.project import Project
from drawloom.graph.recipe.loading import RecipeFolder
from support.editor import Editor

LIMIT_MS = 100
ROUNDS = 20


def main() -> None:
    """Print a row for first_run and for the largest recipe, and fail if a keystroke exceeds the limit."""
    project = Project.from_package("drawloom")
    recipes = [*RecipeFolder(project.recipes).paths.values()]
    largest = max(recipes, key=lambda path: len(project.graph(project.load(str(path)), root="").nodes))
    print(f"{'ms, the median':24} {'in process':>11} {'in an editor':>13} {'slowest':>8}")
    slowest_ms = [
        _row(project, path) for path in dict.fromkeys([project.recipes / "start" / "first_run.toml", largest])
    ]
    if max(slowest_ms) > LIMIT_MS:
        raise SystemExit(f"a keystroke takes more than {LIMIT_MS} ms")


def _row(project: Project, path: Path) -> float:
    text = path.read_text("utf-8")
    workspace, times, waits = Workspace(project), list[float](), list[float]()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        recipe = Path(folder).resolve() / "recipe.toml"
        for number in range(ROUNDS):
            began = perf_counter()
            workspace.texts[recipe] = f"{text}# {number}\n"
            list(diagnose(workspace, recipe))
            times.append(perf_counter() - began)
        with Editor(Path(folder), shop=False) as editor:
            editor.type("recipe.toml", text)  # imports components
            for number in range(ROUNDS):
                began = perf_counter()
                editor.type("recipe.toml", f"{text}# {number}\n")
                waits.append(perf_counter() - began)
    nodes = len(workspace.analyses[recipe].graph.nodes)
    inside, outside = 1e3 * median(times), 1e3 * median(waits)
    print(f"{f'{path.stem}, {nodes} nodes':24} {inside:>11.1f} {outside:>13.1f} {1e3 * max(waits):>8.1f}", flush=True)
    return outside
