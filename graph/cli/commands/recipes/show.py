"""print the resolved recipe as TOML"""

from collections.abc import Mapping
from typing import Any

from drawloom.graph.cli.command import Project, RecipeCommand, Result, command, output, output_class
from drawloom.graph.inspect.serialize import serialize_nodes


@output_class
class ShowResult(Result):
    """The resolved recipe."""

    nodes: Mapping[str, Any] = output("settings and edges by node; an edge is `@name`")
    toml: str = output("resolved recipe with the origin of every value as a comment")

    def render(self, format: str) -> str:
        """Return TOML."""
        return self.toml.removesuffix("\n")


@command
class ShowCommand(RecipeCommand):
    """The resolved recipe."""

    def run(self, project: Project) -> ShowResult:
        recipe = self.load_checked_recipe_and_warn(project, self.recipe)
        return ShowResult(serialize_nodes(recipe.graph.require_valid().nodes), recipe.to_resolved_toml())
