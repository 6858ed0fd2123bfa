"""Exit codes, and which of several processes prints problems and failures."""

import sys
from collections.abc import Callable, Iterable

import attrs

from drawloom.graph.problems import Problem

OK, FAILED, INVALID, INTERRUPTED = 0, 1, 2, 130

MOST = 200
"""Problems that are printed at most."""


def told(problems: Iterable[Problem]) -> str:
    """Problems as text, one a line."""
    problems = list(problems)
    lines = [str(problem) for problem in problems[:MOST]]
    return "\n".join([*lines, f"and {len(problems) - MOST} more"] if len(problems) > MOST else lines)


def _always(_text: str) -> bool:
    return True


@attrs.frozen
class Console:
    """
    What this process prints, if several run the same command; a single process prints everything.

    `warns` says that it prints what all of them find, such as warnings. `is_first(text)` returns whether it is the
    first process that fails, and so the one to print why.
    """

    warns: bool = True
    is_first: Callable[[str], bool] = _always

    def warn(self, problems: Iterable[Problem]) -> None:
        """Print warnings on stderr."""
        if self.warns and (text := told(problems)):
            print(text, file=sys.stderr)

    def fail(self, text: str, exit_code: int) -> int:
        """Print why the command fails on stderr; the exit code."""
        if self.is_first(text):
            print(text, file=sys.stderr)
        return exit_code
