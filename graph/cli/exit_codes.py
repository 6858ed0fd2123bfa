"""Exit codes, and a console printing problems and failures once for several processes."""

import errno
from collections.abc import Callable, Iterable

import attrs

from drawloom.graph.cli.terminal import print_escaped_text
from drawloom.graph.problems import Problem

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
