"""Problems of recipes as data, how they are printed, and did-you-mean suggestions for their hints."""

import difflib
from collections.abc import Iterable

import attrs

KeyPath = tuple[str | int, ...]
"""The way to a value: keys of tables and, inside arrays, indices from 0."""


@attrs.frozen(order=True)
class Position:
    """A position in a recipe: a file with a line and a column (both from 1, in code points), or the command line."""

    source: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source


COMMAND_LINE = Position("command line")


@attrs.frozen
class Problem:
    """
    One thing that is wrong with a recipe: `text` is what is there and why it is invalid, `hint` what to write instead.

    `code` is explained in docs/problems.md. `path` leads from the node, or from a setting's value while only that is
    known, to the part that is wrong.
    """

    code: str
    text: str
    hint: str = ""
    node: str = ""
    position: Position | None = None
    warning: bool = False
    path: KeyPath = ()

    def as_data(self) -> dict[str, str | int | bool]:
        """The problem for `--format json`; line and column are 0 if it has no place in a file."""
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
        where = f"{self.position}: " if self.position else ""
        kind = "warning: " if self.warning else ""
        node = f"[{self.node}] " if self.node else ""
        hint = f"; {self.hint}" if self.hint else ""
        return f"{where}{kind}{node}{self.text}{hint} ({self.code})"


class RecipeError(Exception):
    """A recipe is invalid; `problems` lists everything that is wrong with it."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = sort_problems(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class UserError(Exception):
    """An error at run time that the user can fix: printed as it is, without a traceback."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.at = ""

    def set_node(self, position: Position | None, node: str) -> None:
        """Prefix the message with the node that raised it, and with the place where the reason is written, if any."""
        self.at = f"{position}: [{node}] " if position else f"[{node}] "

    def __str__(self) -> str:
        return f"{self.at}{super().__str__()}"


class ReportedError(UserError):
    """An error that is printed already, once for several processes; uncaught, it ends a process silently."""


def sort_problems(problems: Iterable[Problem]) -> list[Problem]:
    """Problems sorted by file, line and column without duplicates; those without a place come last."""
    last = Position("\U0010ffff")
    return sorted(dict.fromkeys(problems), key=lambda problem: problem.position or last)


MAX_FUZZY_CANDIDATES, MAX_CANDIDATES = 120, 1000
"""From MANY known names on, only those one edit away are suggested, and from TOO_MANY on none: difflib takes quadratic
time, and a recipe with thousands of problems must still be reported within seconds."""

MAX_COMPARED_LETTERS = 60
"""Letters of a name that are compared."""

MAX_SHORT_NAME = 3
"""Letters of a name that is not taken for one with another letter."""

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789_-."


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint with the known name nearest to `name`, or else with all known names if they are few."""
    known = list(known)
    near = find_nearest(name, known)
    if near is not None:
        return f"did you mean {near!r}?"
    if known and len(known) <= 12:
        return "there is " + ", ".join(sorted(known))
    return ""


def find_nearest(name: str, known: Iterable[str]) -> str | None:
    """
    The known name that is most similar to `name`, ignoring case; None if none is similar.

    One word is compared with the last ones of dotted names, too: `optim.adamw` is near to `adamw`. Of short words one
    with another letter is another word: `cpu` is not near to `gpu`, but to `cup`.
    """
    known = list(known)
    if len(known) >= MAX_CANDIDATES:
        return None
    if ends := sorted(each for each in known if each.endswith(f".{name}")):
        return ends[0]
    name = name.casefold()[:MAX_COMPARED_LETTERS]
    # Sorted, so that of equally similar names the same is suggested on every machine.
    folded = {candidate.casefold(): candidate for candidate in sorted(known)}
    if name in folded:
        return folded[name]
    if len(name) <= MAX_SHORT_NAME:
        folded = {
            each: known for each, known in folded.items() if len(each) != len(name) or sorted(each) == sorted(name)
        }
    near = (
        difflib.get_close_matches(name, folded, n=1, cutoff=0.6)
        if len(folded) < MAX_FUZZY_CANDIDATES
        else _find_one_edit_away(name, folded)
    )
    return folded[near[0]] if near else None


def _find_one_edit_away(name: str, known: Iterable[str]) -> list[str]:
    """The known names that differ from this one by one letter inserted, deleted, replaced or swapped."""
    cuts = [(name[:at], name[at:]) for at in range(len(name) + 1)]
    near = {name, *(head + tail[1:] for head, tail in cuts)}
    near |= {head + tail[1] + tail[0] + tail[2:] for head, tail in cuts if len(tail) > 1}
    # With `skipped` the letter replaces one, without it is inserted.
    near |= {head + letter + tail[skipped:] for head, tail in cuts for letter in LETTERS for skipped in (0, 1)}
    return sorted(near.intersection(known))
