"""JSON lines: one object per line, with its text in one field."""

import codecs
import json
from collections.abc import Iterator, Sequence
from typing import IO

import attrs

from drawloom.components.data.sources.documents import PART_BYTES, Document
from drawloom.components.data.sources.files import File, open_file
from drawloom.graph import UserError


@attrs.frozen
class JsonLinesPart:
    """Lines in a file from byte `begin` to before `end`; all lines in a compressed file."""

    file: File
    field: str
    begin: int
    end: int

    @property
    def byte_count(self) -> int:
        """Bytes that these lines take in the file."""
        return min(self.end, self.file.size) - self.begin

    def documents(self) -> Iterator[Document]:
        """Yield the texts in non-blank lines. Raises UserError with a bad line's position."""
        with open_file(self.file) as stream:
            for offset, line in self._iterate_lines(stream):
                text = self._read_text(line, offset)
                yield Document(text, self.file.path, offset)

    def _iterate_lines(self, stream: IO[bytes]) -> Iterator[tuple[int, bytes]]:
        """Yield the non-blank lines with their offsets."""
        offset = self.begin
        if offset:
            stream.seek(offset - 1)
            offset += len(stream.readline()) - 1
        while offset < self.end and (line := stream.readline()):
            if line.strip():
                yield offset, line
            offset += len(line)

    def _read_text(self, line: bytes, offset: int) -> str:
        """Return a line's text. Raises UserError with the line number."""
        try:
            return get_text_field(_parse_line(line), self.field)
        except ValueError as error:
            raise UserError(f"{self.file.path}:{self._find_line_number(offset)}{error}") from error

    def _find_line_number(self, offset: int) -> int:
        """Return the line number at an offset, from 1."""
        with open_file(self.file) as stream:
            number = 1
            while offset > 0 and (block := stream.read(min(2**20, offset))):
                number += block.count(b"\n")
                offset -= len(block)
        return number


def split_json_lines_files(files: Sequence[File], field: str) -> list[JsonLinesPart]:
    """Divide files into line ranges; compressed files are not divided."""
    parts = []
    for file in files:
        step = max(file.size, 1) if file.is_compressed else PART_BYTES
        for begin in range(0, max(file.size, 1), step):
            end = 2**63 if file.is_compressed else min(begin + step, file.size)
            parts.append(JsonLinesPart(file, field, begin, end))
    return parts


def get_text_field(value: object, field: str) -> str:
    """Return the text in an object's field. Raises ValueError with the reason if there is none."""
    if not isinstance(value, dict):
        raise ValueError(
            f': a line must be an object and not {_get_json_type_name(value)}; write a line like {{"{field}": "..."}}'
        )
    if field not in value:
        fields = ", ".join(value) or "none"
        raise ValueError(f': the object has no field "{field}", only {fields}; set `field` to one of them')
    text = value[field]
    if not isinstance(text, str):
        raise ValueError(f': field "{field}" is {_get_json_type_name(text)}; a document must be a string')
    try:
        text.encode()
    except UnicodeEncodeError as error:
        character = f"\\u{ord(text[error.start]):04x}"
        raise ValueError(f': field "{field}" contains {character}, half of a surrogate pair; remove it') from error
    return text


def _parse_line(line: bytes) -> object:
    """Parse a JSON line. Raises ValueError with the reason."""
    try:
        return json.loads(line.decode("utf-8"))
    except json.JSONDecodeError as error:
        if line.startswith(codecs.BOM_UTF8):
            raise ValueError(": begins with a byte order mark; save the file as UTF-8 without one") from error
        raise ValueError(f":{error.colno}: not JSON ({error.msg}); repair or remove the line") from error
    # RecursionError: deep nesting; ValueError: invalid UTF-8, and integers of too many digits
    except (ValueError, RecursionError) as error:
        raise ValueError(f": can't be read ({error}); repair or remove the line") from error


def _get_json_type_name(value: object) -> str:
    """Return the JSON name for a value's type."""
    if value is None:
        return "null"
    names: dict[type, str] = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    return names.get(type(value), "a number")
