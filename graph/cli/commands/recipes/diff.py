"""list the differences between two recipes or runs, and their impact on resuming"""

from collections.abc import Sequence
from typing import ClassVar

import attrs

from drawloom.graph.cli.command import (
    OverlayCommand,
    Project,
    Recipe,
    Result,
    argument,
    command,
    internal,
    output,
    output_class,
)


@output_class
class ChangeData:
    """Difference between two recipes."""

    node: str = output("node; empty for the whole recipe")
    key: str = output("setting or edge; empty for the node itself")
    old: str = output("value of the first recipe, or `absent`")
    new: str = output("value of the second recipe, or `absent`")
    impact: str = output("effect on a resumed run: cosmetic, safe, changes_training or incompatible")
    edge: bool = output("whether the key is an edge")
    why: str = output("reason for the impact, if the component has one")


@output_class
class DiffResult(Result):
    """Differences between two recipes or runs."""

    changes: Sequence[ChangeData] = output("differences by node and key")
    lines: Sequence[str] = internal()

    def render(self, format: str) -> str:
        """Return one line per difference."""
        return "\n".join(self.lines) or "no differences"


@command
class DiffCommand(OverlayCommand):
    """A comparison between two recipes."""

    epilog: ClassVar[str] = "Overlays and values apply to B."

    old: str = argument("a path, the name of a shipped recipe, or a run folder", metavar="A")
    new: str = argument("a recipe to compare with A: a path, a shipped name, or a run folder", metavar="B")

    def run(self, project: Project) -> DiffResult:
        changes = self.load_recipe(project, self.new).changes_since(Recipe.load(self.old, project=project))
        return DiffResult([ChangeData(**attrs.asdict(change)) for change in changes], [*map(str, changes)])
