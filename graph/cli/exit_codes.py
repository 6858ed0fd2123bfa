"""Exit codes, and the console of a process, which prints problems and failures once for several processes."""

from collections.abc import Callable, Iterable

import attrs

from drawloom.graph.cli.terminal import print_text
from drawloom.graph.problems import Problem

OK, FAILED, INVALID = 0, 1, 2

STOPPED = 128
"""Added to the number of a signal, as shells report a process that a signal ended."""

INTERRUPTED = STOPPED + 2
"""Of SIGINT, by Ctrl-C."""

MAX_PROBLEMS_SHOWN = 200
"""Problems that are printed at most: more would scroll the first ones away."""


def format_problems(problems: Iterable[Problem]) -> str:
    """Problems as text, one a line."""
    problems = list(problems)
    lines = [str(problem) for problem in problems[:MAX_PROBLEMS_SHOWN]]
    return "\n".join(
        [*lines, f"and {len(problems) - MAX_PROBLEMS_SHOWN} more"] if len(problems) > MAX_PROBLEMS_SHOWN else lines
    )


def describe_shortage(error: Exception) -> str:
    """What an error says that this machine lacks, memory or threads; empty if it is another error."""
    text = str(error).strip()
    # torch raises a RuntimeError for memory of the CPU, and an OutOfMemoryError for that of a GPU.
    memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if memory or (isinstance(error, RuntimeError) and "can't allocate memory" in text):
        return f"not enough memory: {text or 'an allocation failed'}; use a smaller model or batch"
    if isinstance(error, RuntimeError) and "can't start new thread" in text:
        return "no more threads can be started; raise the limit of processes (`ulimit -u`, or pids.max of the cgroup)"
    return ""


def _always(_text: str) -> bool:
    return True


@attrs.frozen
class Console:
    """
    Prints problems and failures on stderr, once if several processes run the same command.

    `warns`: this process prints what all processes find, such as warnings. `is_first(text)` returns whether this
    process is the first that fails, and so the one that prints the reason.
    """

    warns: bool = True
    is_first: Callable[[str], bool] = _always

    def warn(self, problems: Iterable[Problem]) -> None:
        """Print warnings on stderr."""
        if self.warns and (text := format_problems(problems)):
            print_text(text, "stderr")

    def fail(self, text: str, exit_code: int) -> int:
        """Print why the command fails on stderr; the exit code."""
        if self.is_first(text):
            print_text(text, "stderr")
        return exit_code
