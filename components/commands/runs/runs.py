"""list runs: state, step, best loss, tokens per second, and how their recipes differ"""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from drawloom.components.report.run_record import (
    COLUMNS,
    RunRow,
    State,
    list_differing_setting_keys,
    read_run_rows,
    sort_run_rows,
)
from drawloom.graph.cli.command import (
    JSON,
    Command,
    Project,
    Result,
    UserError,
    argument,
    command,
    format_table,
    option,
    output,
    output_class,
    print_escaped_text,
)

MAX_SETTINGS_SHOWN = 6
"""Differing settings of a run in the table; CSV and JSON have all, as a whole."""
MAX_VALUE_LENGTH = 30


@output_class
class RunsResult(Result):
    """Runs in a folder and in its subfolders."""

    formats: ClassVar[tuple[str, ...]] = ("text", "csv", JSON)

    runs: Sequence[RunRow] = output("runs, in the order of --sort")

    def render(self, format: str) -> str:
        """Return a table for a terminal, or CSV."""
        return format_run_csv(self.runs) if format == "csv" else format_run_table(self.runs)


@command
class RunsCommand(Command):
    """A list of runs."""

    folder: Path = argument("folder with run folders, at any depth", default=Path("runs"))
    sort: str = option(
        "sort by a column, such as best, or by a differing setting, such as optimizer.lr",
        default="run",
        metavar="COLUMN",
    )
    reverse: bool = option("sort in descending order")
    state: State | None = option("list only runs in this state")

    def run(self, project: Project) -> RunsResult:
        if not self.folder.is_dir():
            hint = "`drawloom run` makes it with the first run; or give the folder with your runs"
            raise UserError(f"there is no folder {self.folder}; {hint}", 2)
        rows = sort_run_rows(read_run_rows(self.folder), self.sort, reverse=self.reverse)
        shown = [row for row in rows if self.state in (None, row.state)]
        for row in shown:
            if row.problem:
                print_escaped_text(row.problem, "stderr")
        return RunsResult(shown)


def format_run_table(rows: Sequence[RunRow]) -> str:
    """Return the table for a terminal, with a line per run."""
    if not rows:
        return "no runs"
    lines = [("run", "state", "step", "loss", "best", "tokens/s", "differs in"), *map(_make_table_cells, rows)]
    return format_table(lines, left=(0, 1, 6))


def format_run_csv(rows: Sequence[RunRow]) -> str:
    """Return CSV with a column per differing setting."""
    keys = list_differing_setting_keys(rows)
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*COLUMNS, *keys])
    for row in rows:
        writer.writerow([*(getattr(row, name) for name in COLUMNS), *(row.differs.get(key) for key in keys)])
    return file.getvalue().rstrip("\n")


def _make_table_cells(row: RunRow) -> tuple[str, ...]:
    """Return a run's cells: name, state, step, last and best loss, speed, and settings."""
    step = "" if row.step is None else f"{row.step}/{row.steps}" if row.steps else str(row.step)
    numbers = ["" if value is None else f"{value:.4f}" for value in (row.loss, row.best)]
    speed = "" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}"
    settings = [f"{key}={shorten_value(value, MAX_VALUE_LENGTH)}" for key, value in row.differs.items()]
    if len(settings) > MAX_SETTINGS_SHOWN:
        settings[MAX_SETTINGS_SHOWN:] = [f"and {len(settings) - MAX_SETTINGS_SHOWN} more"]
    return row.run, row.state, step, *numbers, speed, "  ".join(settings)


def shorten_value(value: str, length: int) -> str:
    """Cut a long value at this many characters."""
    return value if len(value) <= length else f"{value[:length]}..."
