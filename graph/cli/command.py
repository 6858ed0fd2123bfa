"""
The vocabulary for commands: `@command`, `argument` and `option`, results with exit codes, and names that most
commands use.

A command is an attrs class in a file with its name. Its fields are its arguments; parser, checks, help and the tools
for agents follow from them.
"""

import errno
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from types import NoneType
from typing import Annotated, Any, ClassVar, TypeVar, dataclass_transform, get_args

import attrs

from drawloom.graph.cli.terminal import format_table, print_escaped_text
from drawloom.graph.component import Check, at_least
from drawloom.graph.problems import Problem, RecipeError, UserError
from drawloom.graph.project import Project, Recipe
from drawloom.graph.types.assignable import union_members_except_none

OK, FAILED, INVALID = 0, 1, 2

STOPPED = 128
"""Base of exit codes for signals: a shell adds the signal number when a signal ended a process."""

INTERRUPTED = STOPPED + 2
"""Exit code after SIGINT from Ctrl-C."""

MAX_PROBLEMS_SHOWN = 200
"""Problems that are printed; more would scroll the first ones away."""


def format_problems(problems: Iterable[Problem]) -> str:
    """Return problems as text, one per line."""
    problems = list(problems)
    lines = [str(problem) for problem in problems[:MAX_PROBLEMS_SHOWN]]
    return "\n".join(
        [*lines, f"and {len(problems) - MAX_PROBLEMS_SHOWN} more"] if len(problems) > MAX_PROBLEMS_SHOWN else lines
    )


def describe_machine_limit(error: Exception) -> str:
    """Return a message about a limit of this machine: memory, threads or file names. Empty for other errors."""
    text = str(error).strip()
    # torch raises a RuntimeError for CPU memory, and an OutOfMemoryError for GPU memory.
    lacks_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if lacks_memory or (isinstance(error, RuntimeError) and "can't allocate memory" in text):
        return f"not enough memory: {text or 'an allocation failed'}; use a smaller model or batch"
    if isinstance(error, RuntimeError) and "can't start new thread" in text:
        return "no more threads can be started; raise the limit of processes (`ulimit -u`, or pids.max of the cgroup)"
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return f"{error.filename}: the file system allows no name as long as this one; write a shorter one"
    return ""


@attrs.frozen
class Console:
    """
    Printer of problems and failures on stderr. Several processes with the same command print them once.

    `warns` is true if this process prints shared findings, such as warnings. `is_first(text)` returns whether this
    process is the first to fail, and so prints the reason.
    """

    warns: bool = True
    is_first: Callable[[str], bool] = lambda _: True

    def print_warnings(self, problems: Iterable[Problem]) -> None:
        if self.warns and (text := format_problems(problems)):
            print_escaped_text(text, "stderr")


Schema = dict[str, Any]

JSON = "json"

T = TypeVar("T")


def output(doc: str, default: Any = attrs.NOTHING) -> Any:
    """Declare a JSON field; `doc` describes it in the schema."""
    return attrs.field(default=default, metadata={"doc": doc})


def internal(default: Any = attrs.NOTHING) -> Any:
    """Declare a field for `render` alone."""
    return attrs.field(default=default)


@dataclass_transform(frozen_default=True, field_specifiers=(output, internal))
def output_class(cls: type[T]) -> type[T]:
    """Make a frozen attrs class from `output` and `internal` fields: a Result, or a part."""
    return attrs.frozen(cls, slots=False)  # a result may have several of them as bases


@output_class
class Result:
    """
    A command's result. Its fields are the JSON text, and `render` returns the other formats.

    The return annotation of a command's `run` names the class, and with it the formats and the schema. Fields are
    strings, numbers, booleans, paths, None, attrs classes, and sequences and string-keyed mappings of these.
    """

    formats: ClassVar[tuple[str, ...]] = ("text", JSON)
    """Choices of `--format`; the first is the default."""

    @property
    def exit_code(self) -> int:
        """The command's exit code."""
        return OK

    def render(self, format: str) -> str:
        """Return the result in a format other than JSON. An empty string prints nothing more than the command did."""
        return ""


@output_class
class TextResult(Result):
    """A result made with its text."""

    text: str = internal()

    def render(self, format: str) -> str:
        """Return the text."""
        return self.text


@output_class
class ProblemData:
    """A recipe's problem; line and column are 0 without a position in a file."""

    code: str = output("code of docs/problems.md")
    warning: bool = output("whether the recipe can still run")
    source: str = output("file, or `command line`")
    line: int = output("line, from 1")
    column: int = output("column, from 1")
    node: str = output("node, or an empty string")
    text: str = output("what is wrong")
    hint: str = output("remedy, or an empty string")


@output_class
class CommandFailure:
    """Reason why a command has no result."""

    exit_code: int = output("exit code of the command")
    text: str = output("text on stderr")
    problems: Sequence[ProblemData] = output("problems of the recipe", default=())

    @classmethod
    def from_error(cls, error: RecipeError | UserError) -> "CommandFailure":
        """Return the failure for a user's error."""
        if isinstance(error, RecipeError):
            problems = [ProblemData(**problem.as_data()) for problem in error.problems]
            return cls(INVALID, format_problems(error.problems), problems)
        return cls(error.exit_code, str(error))


def list_json_fields(cls: type) -> list["attrs.Attribute[Any]"]:
    """Return the fields declared by `output`."""
    return [field for field in attrs.fields(cls) if "doc" in field.metadata]


def find_result_classes(function: Callable[..., Any]) -> list[type[Result]]:
    """Return the result classes in a command's return annotation. Empty for a server, whose stdout is a protocol."""
    kind = typing.get_type_hints(function)["return"]
    members = [] if kind is type(None) else union_members_except_none(kind)
    if wrong := [member for member in members if not issubclass(member, Result)]:
        raise TypeError(f"{function.__qualname__} returns {wrong[0].__name__}; a command returns a Result")
    return members


def list_output_formats(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return a command's choices for `--format`, the default first."""
    return tuple(dict.fromkeys(format for cls in find_result_classes(function) for format in cls.formats))


# Names of other modules, for commands
__all__ = ["Problem", "Project", "Recipe", "RecipeError", "UserError", "format_table", "print_escaped_text"]

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
