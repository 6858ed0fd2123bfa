"""check a recipe, and print every problem at once"""

from collections.abc import Sequence

from drawloom.graph.cli.command import (
    INVALID,
    JSON,
    OK,
    Problem,
    ProblemData,
    Project,
    RecipeCommand,
    RecipeError,
    Result,
    command,
    option,
    output,
    output_class,
)
from drawloom.graph.problems import sort_and_deduplicate_problems


@output_class
class CheckResult(Result):
    """A recipe's problems."""

    recipe: str = output("recipe as given")
    nodes: int = output("number of nodes")
    problems: Sequence[ProblemData] = output("errors and warnings")

    @property
    def exit_code(self) -> int:
        """2 if a problem is not a warning."""
        return OK if all(problem.warning for problem in self.problems) else INVALID

    def render(self, format: str) -> str:
        """Return one line; the problems are on stderr."""
        count = len(self.problems)
        result = f"{count} warning{'s' * (count > 1)}" if count else "no problems"
        return f"{self.recipe}: {self.nodes} nodes, {result}"


@command
class CheckCommand(RecipeCommand):
    """A recipe's check, without building nodes."""

    elsewhere: bool = option("skip checks of files and devices, for a recipe that runs on another machine")

    def run(self, project: Project) -> CheckResult:
        problems, nodes = list[Problem](), 0
        try:
            recipe = self.load_recipe(project, self.recipe)
            nodes = len(recipe.graph.nodes)
            problems = [problem for problem in recipe.graph.problems if problem.warning]
            if self.format != JSON:
                self.console.print_warnings(problems)
            recipe.check(skip_machine_checks=self.elsewhere)
        except RecipeError as error:
            if self.format != JSON:
                raise
            problems = sort_and_deduplicate_problems([*problems, *error.problems])
        return CheckResult(self.recipe, nodes, [ProblemData(**problem.as_data()) for problem in problems])
