"""A corpus of JSON lines, one document per line."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import attrs

from drawloom.components.data import files
from drawloom.components.data.files import split_texts
from drawloom.components.ports.corpus import Split
from drawloom.graph import UserError, between, component, setting


@component
class JsonLines:
    """
    Documents in JSON-lines files: one object per line, with its text in one field.

    The split of a document depends only on its text, so that lines may be moved and added, and duplicates are never in
    both splits. Of a few documents, the end of each is validation data.
    """

    paths: list[str] = setting(
        check=lambda paths: None if paths else "an empty list names no file",
        doc="globs of UTF-8 files, relative to the current directory; `**` crosses folders",
    )
    field: str = setting(default="text", doc="the field of each object with the text")
    validation_fraction: float = setting(
        default=0.05, check=between(0, 1), doc="fraction of the documents to hold out for evaluation; 0: none"
    )

    def documents(self, split: Split) -> Iterator[str]:
        """The texts of one split, in the order of files and lines. Raises UserError with the position of a bad line."""
        return split_texts(_Documents(self), split, self.validation_fraction)

    def texts(self) -> Iterator[str]:
        """The texts of both splits, in the order of files and lines."""
        for file in files.find(self.paths):
            for number, line in self._lines(file.path):
                yield self._text(line, f"{file.path}:{number}")

    def _lines(self, path: Path) -> Iterator[tuple[int, bytes]]:
        """The lines that are not blank, with their numbers from 1."""
        try:
            with path.open("rb") as stream:
                yield from ((number, line) for number, line in enumerate(stream, 1) if line.strip())
        except OSError as error:
            raise files.unreadable(path, error) from error

    def _text(self, line: bytes, where: str) -> str:
        value = _parse(line, where)
        if not isinstance(value, dict):
            raise UserError(
                f'{where}: a line must be an object and not {_kind(value)}; write a line like {{"{self.field}": "..."}}'
            )
        if self.field not in value:
            fields = ", ".join(value) or "none"
            raise UserError(
                f'{where}: the object has no field "{self.field}", only {fields}; set `field` to one of them'
            )
        return _unicode(value[self.field], self.field, where)


@attrs.frozen
class _Documents:
    """The documents of a corpus for `split_texts`, which iterates them twice; read anew, as they may not fit memory."""

    corpus: JsonLines

    def __iter__(self) -> Iterator[tuple[bytes, Callable[[], str]]]:
        for text in self.corpus.texts():
            yield text.encode(), partial(str, text)


def _parse(line: bytes, where: str) -> object:
    try:
        return json.loads(line.decode("utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{where}:{error.colno}: not JSON ({error.msg}); repair or remove the line") from error
    # RecursionError: deep nesting; ValueError: invalid UTF-8, and integers of too many digits
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: can't be read ({error}); repair or remove the line") from error


def _unicode(value: object, field: str, where: str) -> str:
    if not isinstance(value, str):
        raise UserError(f'{where}: field "{field}" is {_kind(value)}; a document must be a string')
    try:
        value.encode()
    except UnicodeEncodeError as error:
        character = f"\\u{ord(value[error.start]):04x}"
        raise UserError(
            f'{where}: field "{field}" contains {character}, half of a surrogate pair; remove it'
        ) from error
    return value


def _kind(value: object) -> str:
    """JSON's name of a value's type."""
    if value is None:
        return "null"
    names: dict[type, str] = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    return names.get(type(value), "a number")
