"""show where values come from and why nodes are connected"""

from drawloom.graph.cli.command import Project, RecipeCommand, Result, argument, command, output, output_class


@output_class
class ExplainResult(Result):
    """Text about a recipe, a node or a value."""

    target: str = output("explained node, setting or edge; empty for the recipe")
    text: str = output("explanation")

    def render(self, format: str) -> str:
        """Return the explanation."""
        return self.text


@command
class ExplainCommand(RecipeCommand):
    """An explanation for a recipe, a node or a value."""

    target: str = argument(
        "node, setting or edge to explain (default: the whole recipe)", default="", metavar="NODE[.KEY]"
    )

    def run(self, project: Project) -> ExplainResult:
        recipe = self.load_checked_recipe_and_warn(project, self.recipe)
        return ExplainResult(self.target, recipe.explain(self.target))
