"""
The vocabulary for commands: `@command`, `argument` and `option`, and names used by most commands.

A command is an attrs class in a file with its name. Its fields are its arguments; parser, checks, help and the tools
for agents follow from them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import NoneType
from typing import Annotated, Any, ClassVar, TypeVar, dataclass_transform, get_args

import attrs

from drawloom.graph.cli.result import (
    FAILED,
    INVALID,
    JSON,
    OK,
    STOPPED,
    Console,
    Result,
    TextResult,
    internal,
    output,
    output_class,
)
from drawloom.graph.cli.terminal import format_table, print_escaped_text
from drawloom.graph.component import Check, at_least
from drawloom.graph.problems import Problem, RecipeError, UserError
from drawloom.graph.project import Project, Recipe

__all__ = ["Command", "Count", "OverlayCommand", "RecipeCommand", "argument", "command", "option"]
__all__ += ["FAILED", "INVALID", "JSON", "OK", "STOPPED", "Result", "TextResult", "internal", "output"]
__all__ += ["Problem", "Project", "Recipe", "RecipeError", "UserError", "output_class"]
__all__ += ["format_table", "print_escaped_text"]

T = TypeVar("T")

Count = Annotated[int, at_least(1)]
"""Type for a positive count. A check in an annotation replaces `check`."""

GROUPS = ("recipes", "training", "runs", "models", "data", "planning", "tools")
"""Groups of commands, in the order of `--help`."""


def option(
    doc: str,
    *,
    default: Any = attrs.NOTHING,
    positional: bool = False,
    name: str = "",
    metavar: str = "",
    check: Check | None = None,
    parse: Callable[[str], Any] | None = None,
    nargs: str | None = None,
    separator: str = "",
    needs: str = "",
    exclusive: str = "",
) -> Any:
    """
    Declare an option, `--` with its field's name, or another `name`.

    The field's type determines the words: a bool has none and is false by default, a type with None has this default,
    `Literal` has choices, and a Sequence is repeated, or has several words (`nargs`) or parts (`separator`). `parse`
    replaces the type, and raises ValueError. `check` receives every value, and returns why it is invalid, or None. An
    option is refused without the option that it `needs`, and with another one in its `exclusive` group.
    """
    words = {"positional": positional, "name": name, "metavar": metavar, "nargs": nargs, "separator": separator}
    rules = {"check": check, "parse": parse, "needs": needs, "exclusive": exclusive}
    return attrs.field(default=default, metadata={"doc": doc, **words, **rules})


def argument(doc: str, **keywords: Any) -> Any:
    """Declare a positional argument, with the keywords of `option`."""
    return option(doc, positional=True, **keywords)


def _add_default(field: "attrs.Attribute[Any]") -> "attrs.Attribute[Any]":
    """Make False the default for a flag, and None for a field whose type has it."""
    if field.default is not attrs.NOTHING:
        return field
    if field.type is bool:
        return field.evolve(default=False)
    return field.evolve(default=None) if NoneType in get_args(field.type) else field


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(argument, option, attrs.field))
def command(cls: type[T]) -> type[T]:
    """
    Make a class a command, or a base class with arguments for commands.

    The command line finds commands by their files, `plan` in `commands/planning/plan.py`, and imports only the called
    one. The first line of the file's docstring is the summary, and the folder is the command's group in `--help`.
    """
    return attrs.frozen(
        cls, kw_only=True, slots=False, field_transformer=lambda _, fields: [*map(_add_default, fields)]
    )


@command
class Command(ABC):
    """
    A command with its arguments, and with fields set for every command.

    `words` are values such as trainer.steps=10, if the class accepts them; `format` is the chosen result format.
    """

    epilog: ClassVar[str] = ""
    accepts_words: ClassVar[bool] = False

    imports: Sequence[str] = option(
        "also use components from this package, folder or file; may be repeated",
        default=(),
        name="--import",
        metavar="PATH",
    )
    words: Sequence[str] = attrs.field(default=())
    format: str = attrs.field(default="")
    console: Console = attrs.field(factory=Console)

    @abstractmethod
    def run(self, project: Project) -> Result | None:
        """Return the result. The annotation names its classes, and with them the formats; None is for a server."""


@command
class OverlayCommand(Command):
    """A command with recipes, over which overlays and values are merged."""

    epilog: ClassVar[str] = "Set single values with node.key=value."
    accepts_words: ClassVar[bool] = True

    overlay: Sequence[str] = option("merge this recipe over RECIPE; may be repeated", default=(), metavar="FILE")

    def load_recipe(self, project: Project, name: str) -> Recipe:
        """Load a recipe with the overlays and values."""
        return Recipe.load(name, *self.words, overlays=self.overlay, project=project)

    def load_checked_recipe_and_warn(self, project: Project, name: str) -> Recipe:
        """
        Load a recipe and print its warnings. Raises RecipeError with its errors, after the warnings.

        Files and devices missing on this machine are no errors.
        """
        recipe = self.load_recipe(project, name)
        self.console.print_warnings(problem for problem in recipe.graph.problems if problem.warning)
        recipe.check(skip_machine_checks=True)
        return recipe


@command
class RecipeCommand(OverlayCommand):
    """A command with one recipe."""

    recipe: str = argument("a path, the name of a shipped recipe, or a run folder")

    def make_run_words(self, words: Sequence[str]) -> list[str]:
        """Return the words to run the recipe with the same overlays and imports, and other values."""
        overlays = [f"--overlay={path}" for path in self.overlay]
        return ["run", self.recipe, *overlays, *(f"--import={path}" for path in self.imports), *words]
