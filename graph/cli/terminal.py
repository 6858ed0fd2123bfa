"""Text for a terminal: tables, and printing without control characters and without a traceback on failure."""

import os
import re
import sys
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Literal

from drawloom.graph.problems import UserError

Stream = Literal["stdout", "stderr"]

# All of C0, DEL and C1 but tabs and line ends: from ESC or U+009B on, text would be commands to the terminal, such as
# writing to the clipboard (ECMA-48). A lone surrogate, as in a file name that is not UTF-8, has no encoding.
CONTROL = re.compile("(?!\r\n)[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def escape_control_characters(text: str) -> str:
    """Escape control characters as in Python: ESC becomes `\\x1b`."""
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def print_escaped_text(text: str, stream: Stream = "stdout", *, end: str = "\n") -> None:
    """
    Print text from any source, such as a model or a file name.

    If standard output fails, raises BrokenPipeError if its reader closed it, as `head` does, and otherwise UserError.
    Later output is discarded. A failure of standard error is ignored, because no stream is left to report it.
    """
    try:
        print(escape_control_characters(text), end=end, file=getattr(sys, stream), flush=True)
    except OSError as error:
        redirect_to_null(stream)
        if stream == "stdout" and isinstance(error, BrokenPipeError):
            raise
        if stream == "stdout":
            raise UserError(f"standard output can't be written: {error.strerror}") from error


def redirect_to_null(stream: Stream) -> None:
    """Connect a stream to /dev/null. Otherwise its buffered text would fail again when Python exits."""
    with suppress(OSError, ValueError), open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), getattr(sys, stream).fileno())


@contextmanager
def redirect_stdout_to_stderr() -> Iterator[None]:
    """Send standard output to standard error, for child processes too; a later JSON text is then alone."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def format_table(rows: Sequence[Sequence[str]], left: Container[int] = (0,)) -> str:
    """Return rows as lines with columns; columns in `left` are aligned on the left, the others on the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        [cell.ljust(width) if index in left else cell.rjust(width) for index, (cell, width) in enumerate(cells)]
        for cells in (zip(row, widths, strict=True) for row in rows)
    ]
    return "\n".join("  ".join(line).rstrip() for line in lines)
