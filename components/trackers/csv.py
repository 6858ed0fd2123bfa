"""Tracks metrics in a table, for spreadsheets."""

import csv
import io
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import ClassVar

import attrs

from drawloom.components.ports.run import RunFolder
from drawloom.components.storage.durable_files import replace_file
from drawloom.components.storage.regular_file import open_to_append
from drawloom.components.trackers.background import TrackerInBackground
from drawloom.graph import component

STEP = "step"


@component(impact="safe")
class CsvTracker(TrackerInBackground):
    """
    Writes `metrics.csv` in the run folder: a line for each step, a column for each metric.

    The first line has the names. A metric that comes later adds a column, with empty fields in the lines before; one
    without a finite value at a step leaves its field empty. Numbers round-trip exactly.
    """

    called: ClassVar[str] = "metrics.csv"

    folder: RunFolder

    _names: list[str] = attrs.field(init=False, factory=list)

    @property
    def _path(self) -> Path:
        return self.folder.folder / "metrics.csv"

    def _prepare(self) -> None:
        os.close(open_to_append(self._path))

    def _begin(self, step: int) -> None:
        with self._path.open(encoding="utf-8", newline="") as file:
            table = csv.DictReader(file)
            # A line that a kill left incomplete is one of a step that is done again.
            rows = [row for row in table if (number := row.get(STEP) or "").isdigit() and int(number) <= step]
            self._names = [STEP, *(name for name in table.fieldnames or () if name != STEP)]
        self._replace(rows)

    def _write(self, step: int, numbers: Mapping[str, float]) -> None:
        if not self._names:
            self._begin(step - 1)
        if new := [name for name in numbers if name not in self._names]:
            with self._path.open(encoding="utf-8", newline="") as file:
                rows = list(csv.DictReader(file))
            self._names += new
            self._replace(rows)
        values = [str(step), *(repr(numbers[name]) if name in numbers else "" for name in self._names[1:])]
        line = _lines([values])
        with os.fdopen(open_to_append(self._path), "ab") as file_:
            file_.write(line)

    def _replace(self, rows: Iterable[Mapping[str, str]]) -> None:
        table = [self._names, *([row.get(name) or "" for name in self._names] for row in rows)]
        replace_file(self._path, _lines(table))

    def _end(self) -> None:
        """Nothing: each line is written as it comes."""


def _lines(table: Iterable[Iterable[str]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(table)
    return text.getvalue().encode()
