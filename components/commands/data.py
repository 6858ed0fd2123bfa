"""show a recipe's data rows and statistics, audit the rows that a run has seen, or verify a token store"""

import argparse
from pathlib import Path

from drawloom.components.commands._data_audit import audit
from drawloom.components.commands._data_show import row_text, statistics
from drawloom.components.commands._options import integer
from drawloom.components.commands._recipes import add_overlays, only
from drawloom.components.data.store.store import Store
from drawloom.components.ports.corpus import Tokenizer
from drawloom.components.ports.data import PackedDataset
from drawloom.components.report.run_record import check_is_run
from drawloom.graph import UserError
from drawloom.graph.cli.terminal import print_text
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
    add_overlays(parser)
    parser.add_argument(
        "--row",
        type=integer(0),
        action="append",
        default=[],
        metavar="N",
        help="show this row, counted from 0; may be repeated",
    )
    parser.add_argument(
        "--split", choices=("train", "validation"), default="train", help="split to show (default: train)"
    )


def main(options: argparse.Namespace, project: Project) -> int:
    """Print rows and statistics, or an audit's result; return 1 if there are faults."""
    if options.action == "verify":
        return _verify(Path(options.subject))
    if options.action == "audit":
        check_is_run(Path(options.subject))
        faults, summary = audit(project, Path(options.subject))
        print_text("\n".join([*faults, summary]))
        return int(bool(faults))
    _show(options, Recipe.load(options.subject, *options.words, overlays=options.overlay, project=project))
    return 0


def _show(options: argparse.Namespace, recipe: Recipe) -> None:
    graph = recipe.graph.require_valid()
    name, tokenizers = only(graph, PackedDataset), graph.implementers(Tokenizer)[:1]
    with recipe.open([name, *tokenizers]) as objects:
        rows = objects[name]
        tokenizer = objects[tokenizers[0]] if tokenizers else None
        if not options.row:
            print_text(statistics(rows))
        for row in options.row:
            if not 0 <= row < rows.count(options.split):
                known = f"rows 0 to {rows.count(options.split) - 1}" if rows.count(options.split) else "no rows"
                raise UserError(f"--row {row}: {options.split} has {known}", 2)
            row_text(rows, options.split, row, tokenizer)


def _verify(folder: Path) -> int:
    if not (folder / "store.json").is_file():
        raise UserError(f"{folder} is no token store; give the folder that `drawloom tokenize --to` wrote", 2)
    store = Store.describe(folder)
    faults = store.faults()
    whole = f"{folder}: {len(store.shards)} shards, {store.token_count:,} tokens, all as they were written"
    print_text("\n".join(faults) or whole)
    return int(bool(faults))
