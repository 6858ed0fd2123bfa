"""prove that a component is right alone, on every mesh, and after a resume"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import attrs
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from drawloom.components.commands._options import check_writable_file, write_file
from drawloom.components.proving.prover import Prover
from drawloom.components.proving.result import ProveResult
from drawloom.components.proving.run import Subject
from drawloom.graph.cli.command import OverlayCommand, Project, argument, command, option

UNITS = {"s": 1, "m": 60, "h": 3600}


def parse_duration(text: str) -> float:
    """Return the seconds in a text such as 90s, 2m or 1h. Raises ValueError."""
    if not (match := re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)):
        raise ValueError(f"{text!r} is not a duration; write 90s, 2m or 1h, for example")
    return float(match[1]) * UNITS[match[2] or "s"]


@command
class ProveCommand(OverlayCommand):
    """A proof by contracts, and by runs on all meshes that a recipe permits."""

    subject: str = argument("a component, such as my_lab.focal, or a recipe", metavar="COMPONENT|RECIPE")
    node: Sequence[str] = option("check the contracts of this node of the recipe; may be repeated", default=())
    budget: float = option("time after which no case begins", default=120.0, parse=parse_duration, metavar="2m")
    case: Sequence[str] = option("try only this case, by its name in the result; may be repeated", default=())
    all: bool = option("try all cases, however long it takes")
    to: Path | None = option(
        "write the smallest failing recipe to this file (default: prove-NAME.toml)",
        metavar="FILE",
        check=check_writable_file,
    )

    def run(self, project: Project) -> ProveResult:
        subject = Subject(self.subject, self.words, self.overlay, self.imports, self.node)
        with _show_progress() as show, Prover(on_progress=show) as prover:
            result: Any = prover.prove(subject, None if self.all else self.budget, self.case)
        if result.recipe:
            path = self.to or Path(f"prove-{Path(self.subject).name.removesuffix('.toml').replace('.', '-')}.toml")
            write_file(path, result.recipe.encode())
            result = attrs.evolve(result, path=path)
        return cast(ProveResult, result)


@contextmanager
def _show_progress() -> Iterator[Callable[[int, int, str], object]]:
    """Yield a function that advances a bar on the terminal, if there is one."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done, total, name: None
        return
    columns = MofNCompleteColumn(), BarColumn(bar_width=20), TextColumn("{task.description}")
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("")
        yield lambda done, total, name: bar.update(task, completed=done, total=total, description=name)
