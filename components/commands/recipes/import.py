"""print the recipe for a configuration of axolotl, of TRL or Trainer, or of torchtitan"""

from collections.abc import Sequence
from pathlib import Path

from drawloom import at_least
from drawloom.components.commands._options import check_new_file, write_file
from drawloom.components.commands.recipes._foreign_config import detect_framework, import_config, read_config
from drawloom.graph.cli.command import (
    FAILED,
    OK,
    Command,
    Count,
    Project,
    Result,
    argument,
    command,
    option,
    output,
    output_class,
)


@output_class
class ImportResult(Result):
    """A recipe for another framework's configuration."""

    framework: str = output("framework of the configuration: axolotl, torchtitan or trl")
    recipe: str = output("recipe as TOML, with comments")
    unmapped: Sequence[str] = output("keys without a counterpart, with their values")
    path: Path | None = output("written recipe, with --to only")

    @property
    def exit_code(self) -> int:
        """1 if a key has no counterpart."""
        return FAILED if self.unmapped else OK

    def render(self, format: str) -> str:
        """Return the recipe, or its path and the keys without a counterpart."""
        if self.path is None:
            return self.recipe
        return "\n".join([f"wrote {self.path}", *(f"no counterpart: {line}" for line in self.unmapped)])


@command
class ImportCommand(Command):
    """A configuration of another framework as a recipe."""

    file: Path = argument("axolotl's YAML, torchtitan's TOML, or TRL's YAML, or a file with a command's arguments")
    base: str | None = option("extend this recipe (default: by the configuration)", name="--from", metavar="RECIPE")
    ranks: Count = option("data-parallel ranks, to multiply the rows of a device", default=1, check=at_least(1))
    to: Path | None = option("write the recipe to this file", metavar="FILE", check=check_new_file)

    def run(self, project: Project) -> ImportResult:
        config = read_config(self.file)
        imported = import_config(config, detect_framework(config), self.base, self.ranks)
        text = imported.format_recipe(self.file.name, self.file.stem)
        if self.to is not None:
            write_file(self.to, f"{text}\n".encode())
        return ImportResult(imported.framework, text, imported.unmapped, self.to)
