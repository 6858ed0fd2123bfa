"""What the options of commands may be: numbers within bounds, and files that can be written."""

import argparse
import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from drawloom.graph import UserError


def integer(least: int = 1) -> Callable[[str], int]:
    """A parser of integers of at least this. Raises ArgumentTypeError, as argparse expects it."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            wanted = "a positive integer" if least == 1 else f"an integer of {least} or more"
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return int(text)

    return parse


def integers(text: str) -> list[int]:
    """Positive integers with commas between them. Raises ArgumentTypeError."""
    return [integer()(part) for part in text.split(",")]


def temperature(text: str) -> float:
    """A temperature of sampling, finite and not negative. Raises ArgumentTypeError."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on; 0 takes the most likely token each time")
    return number


def output_file(text: str) -> Path:
    """A file that can be written: a long computation is not lost for its name. Raises ArgumentTypeError."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; write the name of a file")
    try:
        with tempfile.TemporaryFile(dir=path.parent):  # permissions alone say nothing of /proc, or to root
            return path
    except OSError as error:
        what = f"no file can be written in {path.parent} ({error.strerror})"
        raise argparse.ArgumentTypeError(f"{what}; write a file in a folder that can be written") from None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around the writing of `--to`: UserError in place of an OSError, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} can't be written: {error.strerror}; write another file with --to", 2) from error
