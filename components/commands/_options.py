"""Command-line options: the batch size, and types for numbers within bounds and writable files."""

import argparse
import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from drawloom.graph import UserError


def make_integer_parser(minimum: int = 1) -> Callable[[str], int]:
    """Return an integer parser that raises ArgumentTypeError for values below `minimum`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            expected = "a positive integer" if minimum == 1 else f"an integer of {minimum} or more"
            raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")
        return int(text)

    return parse


def parse_positive_integers(text: str) -> list[int]:
    """Parse positive integers separated by commas. Raises ArgumentTypeError."""
    return [make_integer_parser()(part) for part in text.split(",")]


def parse_positive_number(text: str) -> float:
    """Parse a finite number above 0. Raises ArgumentTypeError."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def parse_temperature(text: str) -> float:
    """Parse a sampling temperature, finite and not negative. Raises ArgumentTypeError."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on; 0 takes the most likely token each time")
    return number


def parse_writable_path(text: str) -> Path:
    """Parse a file path, and check that the file is writable. Raises ArgumentTypeError."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; write the name of a file")
    try:
        with tempfile.TemporaryFile(dir=path.parent):  # permission bits do not apply to root, nor to /proc
            return path
    except OSError as error:
        reason = f"no file can be written in {path.parent} ({error.strerror})"
        raise argparse.ArgumentTypeError(f"{reason}; write a file in a folder that can be written") from None


def add_batch_size_option(parser: argparse.ArgumentParser, option: str, items: str) -> None:
    """Add an option for the number of items in a forward pass, 8 by default."""
    parser.add_argument(
        option, type=make_integer_parser(), default=8, metavar="N", help=f"{items} per batch (default: 8)"
    )


@contextmanager
def convert_write_errors(path: Path) -> Iterator[None]:
    """Turn an OSError, such as a full disk, into a UserError that names `--to`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} can't be written: {error.strerror}; write another file with --to", 2) from error
