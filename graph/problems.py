"""Problems of recipes as data, their printed form, and did-you-mean suggestions for hints."""

from collections.abc import Iterable
from typing import Any

import attrs

KeyPath = tuple[str | int, ...]
"""Path to a value: keys of tables and, inside arrays, indices from 0."""


@attrs.frozen(order=True)
class Position:
    """Position in a recipe: a file with line and column (both from 1, in code points), or the command line."""

    source: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source


COMMAND_LINE = Position("command line")


@attrs.frozen
class Problem:
    """
    A mistake in a recipe: `text` is the faulty part and why it is invalid, `hint` is the remedy.

    docs/problems.md explains every `code`. `path` leads to the faulty part from the node, or from the value of a
    setting before the node is known.
    """

    code: str
    text: str
    hint: str = ""
    node: str = ""
    position: Position | None = None
    warning: bool = False
    path: KeyPath = ()

    def as_data(self) -> dict[str, Any]:
        """Return the problem for `--format json`. Line and column are 0 without a position in a file."""
        position = self.position or Position("")
        return {
            "code": self.code,
            "warning": self.warning,
            "source": position.source,
            "line": position.line,
            "column": position.column,
            "node": self.node,
            "text": self.text,
            "hint": self.hint,
        }

    def __str__(self) -> str:
        prefix = f"{self.position}: " if self.position else ""
        severity = "warning: " if self.warning else ""
        node = f"[{self.node}] " if self.node else ""
        hint = f"; {self.hint}" if self.hint else ""
        return f"{prefix}{severity}{node}{self.text}{hint} ({self.code})"


class RecipeError(Exception):
    """Error for an invalid recipe. `problems` lists every mistake."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = sort_and_deduplicate_problems(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class UserError(Exception):
    """Run-time error for the user to fix, printed without a traceback."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.prefix = ""

    def add_node_to_message(self, position: Position | None, node: str) -> None:
        """Prefix the message with the raising node, and with the position of the cause, if known."""
        self.prefix = f"{position}: [{node}] " if position else f"[{node}] "

    def __str__(self) -> str:
        return f"{self.prefix}{super().__str__()}"


class ReportedError(UserError):
    """Error already printed, once for several processes. Uncaught, it ends a process silently."""


class ReopenError(UserError):
    """
    Request to close a graph and open it again, after a failure the same nodes can survive.

    The container fills `handed_over` with the nodes' values for their successors, by node. A caller without support for
    reopening lets it end the run.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.handed_over: dict[str, Any] = {}


def sort_and_deduplicate_problems(problems: Iterable[Problem]) -> list[Problem]:
    """Return problems sorted by file, line and column without duplicates. Problems without a position come last."""
    last = Position("\U0010ffff")
    return sorted(dict.fromkeys(problems), key=lambda problem: problem.position or last)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """
    Return a hint with the known name nearest to `name`, or else with all known names if they are few.

    Names of other frameworks, such as `num_train_epochs`, get a hint with drawloom's.
    """
    from drawloom.graph.foreign_names import find_own_name  # few recipes have problems
    from drawloom.graph.spelling import find_nearest

    known = list(known)
    if own := find_own_name(name, known):
        return own
    near = find_nearest(name, known)
    if near is not None:
        return f"did you mean {near!r}?"
    if known and len(known) <= 12:
        return "available: " + ", ".join(sorted(known))
    return ""
