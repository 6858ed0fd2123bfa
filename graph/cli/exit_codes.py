"""How a command ends: its exit code, and what it tells of problems."""

import sys
from collections.abc import Callable, Iterable

import attrs

from drawloom.graph.problems import Problem

FINE, FAILED, FAULTY, INTERRUPTED = 0, 1, 2, 130

MOST = 200
"""Problems that are printed; who has more will not read them all."""


def told(problems: Iterable[Problem]) -> str:
    """Problems as text, a line each."""
    problems = list(problems)
    lines = [str(problem) for problem in problems[:MOST]]
    return "\n".join([*lines, f"and {len(problems) - MOST} more"] if len(problems) > MOST else lines)


def _always(_text: str) -> bool:
    return True


@attrs.frozen
class Voice:
    """
    Who tells what several processes that run the same command have to say: all of it, where there is one process.

    `warns` says that this one tells what all know alike; `is_first` whether it is the first with something to tell of
    how the command fails.
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
