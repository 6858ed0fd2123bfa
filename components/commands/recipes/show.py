"""print the resolved recipe as TOML, or the run as one file of plain PyTorch"""

from pathlib import Path

from drawloom.components.commands._options import check_writable_file, write_file
from drawloom.components.commands.recipes._flat_source import format_flat_source
from drawloom.graph.cli.command import Project, Result, command, option, output, output_class
from drawloom.graph.cli.commands.recipes import show


@output_class
class SourceResult(Result):
    """A run as a Python file."""

    source: str = output("text of the file")
    path: Path | None = output("written file; null without --to")

    def render(self, format: str) -> str:
        """Return the file, or its path if it is written."""
        return self.source.removesuffix("\n") if self.path is None else f"wrote {self.path}; python {self.path} trains"


@command
class ShowCommand(show.ShowCommand):
    """The resolved recipe, or its run as Python source."""

    source: bool = option(
        "print the run as one file of plain PyTorch, with the same losses; for a few components, on one CPU"
    )
    to: Path | None = option("write the source to this file", metavar="FILE", check=check_writable_file, needs="source")

    def run(self, project: Project) -> show.ShowResult | SourceResult:  # type: ignore[override]
        if not self.source:
            return super().run(project)
        source = format_flat_source(self.load_checked_recipe_and_warn(project, self.recipe))
        if self.to is not None:
            write_file(self.to, source.encode())
        return SourceResult(source, self.to)
