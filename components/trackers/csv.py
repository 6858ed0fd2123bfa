"""Tracker with a CSV table, for spreadsheets."""

import csv
import io
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from drawloom import component, internal
from drawloom.components.storage.step_log import AppendedFile
from drawloom.components.trackers.background import TrackerInBackground
from drawloom.ports import RunFolder

STEP = "step"

log = logging.getLogger("drawloom.trackers")


@component(impact="safe")
class CsvTracker(TrackerInBackground):
    """
    CSV tracker: writes `metrics.csv` in the run folder, with a line per step and a column per metric.

    The first line contains the names. A metric that appears later adds a column, with empty fields in earlier lines.
    A value that is missing or not finite leaves its field empty. Numbers round-trip exactly.
    """

    called: ClassVar[str] = "metrics.csv"

    folder: RunFolder

    _names: list[str] = internal(factory=list)
    _file: AppendedFile = internal(None)

    def _load_package_and_create_files(self) -> None:
        self._file = AppendedFile.open(self.folder.folder / "metrics.csv")

    def _open_writer_after(self, step: int) -> None:
        # drop a line that a kill left incomplete: its step is done again
        content = self._file.read().rpartition(b"\n")[0]
        table = csv.reader(io.StringIO(content.decode("utf-8", "replace").replace("\0", "\ufffd"), newline=""))
        names = next(table, [])
        self._names = [STEP, *(name for name in names if name != STEP)]
        rows, damaged = _parse_undamaged_lines(table, names)
        if damaged:
            log.warning("%s is damaged: %d of its lines can't be read, and are removed", self._file.path, damaged)
        self._rewrite_file(row for row in rows if int(row[STEP]) <= step)

    def _write_values(self, step: int, numbers: Mapping[str, float]) -> None:
        if not self._names:
            self._open_writer_after(step - 1)
        if new := [name for name in numbers if name not in self._names]:
            rows = list(csv.DictReader(io.StringIO(self._file.read().decode(), newline="")))
            self._names += new
            self._rewrite_file(rows)
        values = [str(step), *(repr(numbers[name]) if name in numbers else "" for name in self._names[1:])]
        line = _format_csv_lines([values])
        while line:  # a disk that is nearly full accepts only a part
            line = line[self._file.append_what_fits(line) :]

    def _rewrite_file(self, rows: Iterable[Mapping[str, str]]) -> None:
        """Replace the file's content by these rows."""
        table = [self._names, *([row.get(name) or "" for name in self._names] for row in rows)]
        self._file.replace(_format_csv_lines(table))

    def _close_writer(self) -> None:
        self._file.close()


def _parse_undamaged_lines(table: Iterable[list[str]], names: Sequence[str]) -> tuple[list[dict[str, str]], int]:
    """Return the lines with only numbers and increasing steps, as rows by name, and the count of skipped lines."""
    rows, damaged, last = list[dict[str, str]](), 0, -1
    for fields in table:
        row = dict(zip(names, fields, strict=False))
        step = row.get(STEP, "")
        has_numbers = len(fields) == len(names) and all(map(_is_number_or_empty, fields))
        if has_numbers and step.isdecimal() and len(step) < 19 and int(step) > last:
            rows.append(row)
            last = int(step)
        else:
            damaged += 1
    return rows, damaged


def _is_number_or_empty(field: str) -> bool:
    """Return whether a field is a number or empty."""
    try:
        float(field or "0")
    except ValueError:
        return False
    return True


def _format_csv_lines(table: Iterable[Iterable[str]]) -> bytes:
    """Return rows as CSV."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(table)
    return text.getvalue().encode()
