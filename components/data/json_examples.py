"""Examples of token ids in JSON-lines files."""

import json
from typing import Any

import attrs

from drawloom.components.data.sources.documents import split_of
from drawloom.components.data.sources.files import find, opened
from drawloom.components.ports.corpus import Split
from drawloom.components.ports.data import Example
from drawloom.graph import UserError, between, component, setting


@component
class JsonExamples:
    """
    An example for each line that is not blank: an object with `input_ids`, and what else a collator reads.

    The split of an example depends on its line alone. All are held in memory; `.gz` and `.zst` are decompressed.
    """

    paths: list[str] = setting(
        check=lambda paths: None if paths else "an empty list names no file",
        doc="globs of JSON-lines files, relative to the current directory; `**` crosses folders",
    )
    validation_fraction: float = setting(
        default=0.05, check=between(0, 1), doc="fraction of the lines to hold out for evaluation; 0: none"
    )
    _splits: dict[Split, list[Example]] = attrs.field(init=False, factory=dict)

    def open(self) -> None:
        """Read all lines. Raises UserError with the file and the number of one that is no object."""
        self._splits = {"train": [], "validation": []}
        for file in find(self.paths):
            with opened(file) as stream:
                for number, line in enumerate(stream, 1):
                    if line.strip():
                        example = {**_object(line, place := f"{file.path}:{number}"), "source": place}
                        self._splits[split_of(line.strip(), self.validation_fraction)].append(example)

    def close(self) -> None:
        """Free the examples."""
        self._splits = {}

    def examples(self, split: Split) -> list[Example]:
        """The examples of a split, in the order of files and lines."""
        return self._splits[split]


def _object(line: bytes, place: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: it can't be read ({error}); repair or remove the line") from error
    if not isinstance(value, dict):
        raise UserError(f'{place}: it is no object; write a line like {{"input_ids": [5, 8, 2]}}')
    return value
