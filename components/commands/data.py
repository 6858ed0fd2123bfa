"""show a recipe's data rows and statistics, audit the rows that a run has seen, or verify a token store"""

import argparse
from collections.abc import Sequence
from pathlib import Path

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
from drawloom.components.commands._options import make_integer_parser
from drawloom.components.commands._recipes import add_overlay_option, find_only_node
from drawloom.components.data.store.store import Store
from drawloom.components.ports.corpus import Tokenizer
from drawloom.components.ports.data import PackedDataset
from drawloom.components.report.run_record import check_is_run
from drawloom.graph import UserError
from drawloom.graph.cli.exit_codes import FAILED, OK
from drawloom.graph.cli.result import Result, internal, output, output_class
from drawloom.graph.project import Project, Recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line arguments."""
    parser.add_argument(
        "action", choices=("show", "audit", "verify"), help="show rows and statistics, audit a run, or verify a store"
    )
    parser.add_argument(
        "subject",
        metavar="RECIPE|RUN|STORE",
        help="a recipe to show, a run folder to audit, or a token store to verify",
    )
    add_overlay_option(parser)
    parser.add_argument(
        "--row",
        type=make_integer_parser(0),
        action="append",
        default=[],
        metavar="N",
        help="show this row, counted from 0; may be repeated",
    )
    parser.add_argument(
        "--split", choices=("train", "validation"), default="train", help="split to show (default: train)"
    )


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


def main(options: argparse.Namespace, project: Project) -> RowsResult | FaultsResult:
    """Return rows and statistics, or the faults of a run or of a store."""
    if options.action == "verify":
        return _verify_store(Path(options.subject))
    if options.action == "audit":
        check_is_run(Path(options.subject))
        faults, summary = audit_recorded_rows(project, Path(options.subject))
        return FaultsResult(options.subject, faults, summary)
    return _print_rows_or_summarize(
        options, Recipe.load(options.subject, *options.words, overlays=options.overlay, project=project)
    )


def _print_rows_or_summarize(options: argparse.Namespace, recipe: Recipe) -> RowsResult:
    """Print the requested rows; without any, return the statistics. Raises UserError for a missing row."""
    graph = recipe.graph.require_valid()
    name, tokenizers = find_only_node(graph, PackedDataset), graph.implementers(Tokenizer)[:1]
    with recipe.open([name, *tokenizers]) as objects:
        rows = objects[name]
        tokenizer = objects[tokenizers[0]] if tokenizers else None
        for row in options.row:
            if not 0 <= row < rows.count_rows(options.split):
                known = (
                    f"rows 0 to {rows.count_rows(options.split) - 1}" if rows.count_rows(options.split) else "no rows"
                )
                raise UserError(f"--row {row}: {options.split} has {known}", 2)
            print_row(rows, options.split, row, tokenizer)
        shown = [read_row(rows, options.split, row) for row in options.row]
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
