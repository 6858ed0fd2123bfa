"""Problems of recipes as data, their printed form, and did-you-mean suggestions for hints."""

import difflib
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


MAX_FUZZY_CANDIDATES, MAX_CANDIDATES = 120, 1000
"""With MAX_FUZZY_CANDIDATES known names only names one edit away are suggested, with MAX_CANDIDATES none: difflib takes
quadratic time, and thousands of problems must be reported within seconds."""

MAX_COMPARED_LETTERS = 60
"""Letters of a name that are compared."""

MAX_SHORT_NAME = 3
"""Letters of a short name, which another letter makes a different name."""

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789_-."


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """
    Return a hint with the known name nearest to `name`, or else with all known names if they are few.

    Names of other frameworks, such as `num_train_epochs`, get a hint with drawloom's.
    """
    from drawloom.graph.foreign_names import find_own_name  # few recipes have problems

    known = list(known)
    if own := find_own_name(name, known):
        return own
    near = find_nearest(name, known)
    if near is not None:
        return f"did you mean {near!r}?"
    if known and len(known) <= 12:
        return "available: " + ", ".join(sorted(known))
    return ""


def find_nearest(name: str, known: Iterable[str]) -> str | None:
    """
    Return the known name most similar to `name`, ignoring case, or None if none is similar.

    A single word is also compared with the last words of dotted names: `optim.adamw` is near to `AdamW`. For short
    words a replaced letter makes another word: `cpu` is near to `cup`, but not to `gpu`.
    """
    known = list(known)
    if len(known) >= MAX_CANDIDATES:
        return None
    name = name.casefold()[:MAX_COMPARED_LETTERS]
    if ends := sorted(candidate for candidate in known if candidate.casefold().endswith(f".{name}")):
        return ends[0]
    # Sorted, so that every machine suggests the same among equally similar names.
    folded = {candidate.casefold(): candidate for candidate in sorted(known)}
    if name in folded:
        return folded[name]
    if len(name) <= MAX_SHORT_NAME:
        folded = {
            candidate: known
            for candidate, known in folded.items()
            if len(candidate) != len(name) or sorted(candidate) == sorted(name)
        }
    near = (
        difflib.get_close_matches(name, folded, n=1, cutoff=0.6)
        if len(folded) < MAX_FUZZY_CANDIDATES
        else _find_one_edit_away(name, folded)
    )
    return folded[near[0]] if near else None


def _find_one_edit_away(name: str, known: Iterable[str]) -> list[str]:
    """Return the known names with one letter inserted, deleted, replaced or swapped."""
    cuts = [(name[:index], name[index:]) for index in range(len(name) + 1)]
    near = {name, *(head + tail[1:] for head, tail in cuts)}
    near |= {head + tail[1] + tail[0] + tail[2:] for head, tail in cuts if len(tail) > 1}
    # With skipped = 1 the letter replaces another one, with 0 it is inserted.
    near |= {head + letter + tail[skipped:] for head, tail in cuts for letter in LETTERS for skipped in (0, 1)}
    return sorted(near.intersection(known))
