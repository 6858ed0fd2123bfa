"""show a recipe's data rows and statistics, audit the rows that a run has seen, or verify a token store"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from drawloom.components.commands._data_audit import audit_recorded_rows
from drawloom.components.commands._data_show import (
    RowData,
    SplitData,
    count_validation_documents_in_training,
    format_statistics,
    print_row,
    read_row,
    summarize_splits,
)
from drawloom.components.commands._recipes import find_only_node
from drawloom.components.data.store.store import Store
from drawloom.components.ports.corpus import Split, Tokenizer
from drawloom.components.ports.data import PackedDataset
from drawloom.components.report.run_record import check_is_run
from drawloom.graph import UserError
from drawloom.graph.cli.command import OverlayCommand, argument, command, option
from drawloom.graph.cli.exit_codes import FAILED, OK
from drawloom.graph.cli.result import Result, internal, output, output_class
from drawloom.graph.component import at_least
from drawloom.graph.project import Project, Recipe


@output_class
class RowsResult(Result):
    """Statistics of packed rows, or some rows, with `show`."""

    splits: Sequence[SplitData] = output("statistics by split")
    rows: Sequence[RowData] = output("rows of --row")
    text: str = internal()

    def render(self, format: str) -> str:
        """Return the statistics. Rows are printed in colours before."""
        return self.text


@output_class
class FaultsResult(Result):
    """Verdict about a run's rows with `audit`, or a token store with `verify`."""

    subject: str = output("run folder or token store")
    faults: Sequence[str] = output("one sentence per fault, the first ones only")
    summary: str = output("number of steps and rows, or of shards and tokens")

    @property
    def exit_code(self) -> int:
        """1 if there are faults."""
        return FAILED if self.faults else OK

    def render(self, format: str) -> str:
        """Return the faults and the summary."""
        return "\n".join([*self.faults, *([self.summary] if self.summary else [])])


@command("data")
class DataCommand(OverlayCommand):
    """Rows and statistics, or verdicts about a run's rows or a store."""

    action: Literal["show", "audit", "verify"] = argument("show rows and statistics, audit a run, or verify a store")
    subject: str = argument(
        "a recipe to show, a run folder to audit, or a token store to verify", metavar="RECIPE|RUN|STORE"
    )
    row: Sequence[int] = option(
        "show this row, counted from 0; may be repeated", default=(), metavar="N", check=at_least(0)
    )
    split: Split = option("split to show", default="train")

    def run(self, project: Project) -> RowsResult | FaultsResult:
        if self.action == "verify":
            return _verify_store(Path(self.subject))
        if self.action == "audit":
            check_is_run(Path(self.subject))
            faults, summary = audit_recorded_rows(project, Path(self.subject))
            return FaultsResult(self.subject, faults, summary)
        return self._print_rows_or_summarize(self.load_recipe(project, self.subject))

    def _print_rows_or_summarize(self, recipe: Recipe) -> RowsResult:
        """Print the requested rows; without any, return the statistics. Raises UserError for a missing row."""
        graph = recipe.graph.require_valid()
        name, tokenizers = find_only_node(graph, PackedDataset), graph.implementers(Tokenizer)[:1]
        with recipe.open([name, *tokenizers]) as objects:
            rows = objects[name]
            tokenizer = objects[tokenizers[0]] if tokenizers else None
            count = rows.count_rows(self.split)
            for row in self.row:
                if row >= count:
                    known = f"rows 0 to {count - 1}" if count else "no rows"
                    raise UserError(f"--row {row}: {self.split} has {known}", 2)
                print_row(rows, self.split, row, tokenizer)
            shown = [read_row(rows, self.split, row) for row in self.row]
            copies = None if shown else count_validation_documents_in_training(rows)
            return RowsResult(summarize_splits(rows, copies), shown, "" if shown else format_statistics(rows, copies))


def _verify_store(folder: Path) -> FaultsResult:
    """Verify a token store's checksums. Raises UserError if the folder has no store."""
    if not (folder / "store.json").is_file():
        raise UserError(f"{folder} is not a token store; give the folder that `drawloom tokenize --to` wrote", 2)
    store = Store.open_unchecked(folder)
    faults = store.find_faults()
    whole = f"{folder}: {len(store.shards)} shards, {store.token_count:,} tokens, all as they were written"
    return FaultsResult(str(folder), faults, "" if faults else whole)
