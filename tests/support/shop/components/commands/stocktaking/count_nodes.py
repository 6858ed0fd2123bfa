"""count the nodes of a recipe"""

from drawloom.graph.cli.command import RecipeCommand, Result, command, output, output_class
from drawloom.graph.project import Project


@output_class
class CountResult(Result):
    """A number of nodes."""

    nodes: int = output("number of nodes")

    def render(self, format: str) -> str:
        return f"{self.nodes} nodes"


@command
class CountNodesCommand(RecipeCommand):
    """A count of a recipe's nodes."""

    def run(self, project: Project) -> CountResult:
        return CountResult(len(self.load_recipe(project, self.recipe).graph.nodes))
