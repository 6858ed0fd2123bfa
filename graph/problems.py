"""What can be wrong with a recipe, as data; the one place where problems become text."""

from collections.abc import Iterable

import attrs


@attrs.frozen(order=True)
class Place:
    """Where something stands: a file with a line and a column (both from 1, in code points), or the command line."""

    source: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source


COMMAND_LINE = Place("command line")


@attrs.frozen
class Problem:
    """One fault of a recipe: what stands there and why it can't be, and what to write instead."""

    code: str
    text: str
    hint: str = ""
    node: str = ""
    place: Place | None = None
    warning: bool = False

    def as_data(self) -> dict[str, str | int | bool]:
        """What other programs read; a line and column of 0 mean that there is no place in a file."""
        place = self.place or Place("")
        return {
            "code": self.code,
            "warning": self.warning,
            "source": place.source,
            "line": place.line,
            "column": place.column,
            "node": self.node,
            "text": self.text,
            "hint": self.hint,
        }

    def __str__(self) -> str:
        where = f"{self.place}: " if self.place else ""
        kind = "warning: " if self.warning else ""
        node = f"[{self.node}] " if self.node else ""
        hint = f"; {self.hint}" if self.hint else ""
        return f"{where}{kind}{node}{self.text}{hint} ({self.code})"


class RecipeError(Exception):
    """A recipe can't become a graph; `problems` says everything that is wrong with it."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = in_order(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class UserError(Exception):
    """Something that a person can mend, found while running: printed as it is, without a traceback."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.at = ""

    def stands_at(self, place: Place, node: str) -> None:
        """Say which node of the recipe it was."""
        self.at = f"{place}: [{node}] "

    def __str__(self) -> str:
        return f"{self.at}{super().__str__()}"


def in_order(problems: Iterable[Problem]) -> list[Problem]:
    """Problems by file, line and column, each once; those without a place last."""
    nowhere = Place("\U0010ffff")
    return sorted(dict.fromkeys(problems), key=lambda problem: problem.place or nowhere)
