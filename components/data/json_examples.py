"""Token id examples in JSON-lines, Parquet or Arrow files."""

import json
from collections.abc import Iterator

from drawloom import component, internal
from drawloom.components.data.sources.documents import choose_split, file_globs, validation_fraction
from drawloom.components.data.sources.formats import Line, read_json_lines_or_table_rows
from drawloom.ports import Example, Split


@component
class JsonExamples:
    """
    One example per row or non-blank line: an object with `input_ids` and other keys for the collator.

    An example's split depends only on its `prompt`, or without one on its `input_ids`, or else on the whole line. All
    examples stay in memory; `.gz` and `.zst` are decompressed.
    """

    paths: list[str] = file_globs("JSON-lines, Parquet or Arrow files")
    validation_fraction: float = validation_fraction("lines")
    _splits: dict[Split, list[Example]] = internal(factory=dict)

    def check_before_open(self) -> None:
        """Read the first line. Raises UserError for a glob without a file, or a line without an object."""
        next(read_json_lines_or_table_rows(self.paths), None)

    def read_before_open(self) -> Iterator[Example]:
        """Yield all lines. Raises UserError with file and line number for a line that is not an object."""
        return map(_make_example, read_json_lines_or_table_rows(self.paths))

    def open(self) -> None:
        """Read all lines. Raises UserError with file and line number for a line that is not an object."""
        self._splits = {"train": [], "validation": []}
        for line in read_json_lines_or_table_rows(self.paths):
            content = next((line.row[key] for key in ("prompt", "input_ids") if key in line.row), line.row)
            key = json.dumps(content, sort_keys=True, default=str).encode()
            self._splits[choose_split(key, self.validation_fraction)].append(_make_example(line))

    def close(self) -> None:
        """Free the examples."""
        self._splits = {}

    def examples(self, split: Split) -> list[Example]:
        """Return a split's examples, ordered by file and line."""
        return self._splits[split]


def _make_example(line: Line) -> Example:
    return {**line.row, "source": line.position}
