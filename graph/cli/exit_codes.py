"""How a command ends: its exit code, and the problems that it prints."""

import sys
from collections.abc import Iterable

from drawloom.graph.problems import Problem

FINE, FAILED, FAULTY, INTERRUPTED = 0, 1, 2, 130

MOST = 200
"""Problems that are printed; who has more will not read them all."""


def print_problems(problems: Iterable[Problem]) -> int:
    """Print problems on stderr; the exit code of a faulty recipe."""
    problems = list(problems)
    for problem in problems[:MOST]:
        print(problem, file=sys.stderr)
    if len(problems) > MOST:
        print(f"and {len(problems) - MOST} more", file=sys.stderr)
    return FAULTY
