"""measure a run's loss on its validation split, or on other text"""

import argparse
import math
from collections.abc import Iterator
from typing import Any

import torch

from drawloom.components.commands._trained import add_run, trained
from drawloom.components.data.sources.files import find
from drawloom.components.data.sources.parts import FORMATS
from drawloom.components.ports.corpus import Corpus, Split, TokenCorpus, Tokenizer
from drawloom.components.ports.data import Batch, PackedDataset, has_pairs
from drawloom.components.ports.pipeline import LOSSES, Executor, Loss, state_of_batches, sum_losses
from drawloom.components.ports.run import Batching
from drawloom.graph import UserError
from drawloom.graph.cli.terminal import print_text
from drawloom.graph.project import Project, Recipe
from drawloom.graph.recipe.overrides import nested

READERS = {"text": "data.text_files", "json": "data.jsonl", "parquet": "data.parquet", "arrow": "data.parquet"}
AT_ONCE = 16  # microbatches whose tokens are in memory together


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_run(parser)
    help = "text, JSON-lines, Parquet or Arrow files to measure on, whole; the run's own validation split if left out"
    parser.add_argument("--corpus", nargs="+", metavar="GLOB", help=help)


def main(options: argparse.Namespace, project: Project) -> int:
    """Print the mean loss of a token, and what follows from it."""
    split: Split = "train" if options.corpus else "validation"  # another corpus is measured whole
    corpus = _corpus(options.corpus) if options.corpus else None
    ports = (Executor, PackedDataset, Batching, Tokenizer)
    with trained(project, options, *ports, change=lambda recipe: _with_corpus(recipe, corpus)) as (run, step):
        rows, sizes = run.get(PackedDataset), torch.as_tensor(run.get(Tokenizer).token_bytes()).double()
        if not rows.count(split) and options.corpus:
            raise UserError(f"--corpus: there is nothing to predict in {' '.join(options.corpus)}", 2)
        if not rows.count(split):
            raise UserError(f"{options.run_folder}: the validation split is empty; name text files with --corpus", 2)
        total, weight, nats, text_bytes = 0.0, 0.0, 0.0, 0.0
        for batches in _batches(rows, split, run.get(Batching).micro_size):
            state = state_of_batches(batches)
            run.get(Executor).evaluate(state)
            sums = [float(number) for number in sum_losses(state)]
            total, weight = total + sums[0], weight + sums[1]
            named = state[LOSSES]["sums"]
            nats = nats + float(named["cross_entropy"].double().sum()) if "cross_entropy" in named else math.nan
            text_bytes += sum(float(batch.target_bytes(sizes)) for batch in batches)
        unit = "pairs" if has_pairs(type(rows)) else "tokens"
    results = f"loss {total / weight:.4f} over {weight:,.0f} {unit}{_in_other_units(nats, weight, text_bytes)}"
    print_text(f"{options.run_folder}, step {step}: {results}")
    return 0


def _corpus(globs: list[str]) -> dict[str, Any]:
    """The node of a corpus of these files. Raises UserError if there is none, or if they are of several formats."""
    try:
        files = {READERS[FORMATS.get(file.suffix, "text")]: file.path for file in find(globs)}
    except UserError as error:
        raise UserError(f"--corpus: {str(error).removeprefix('paths: ')}", 2) from error
    if len(files) > 1:
        raise UserError(f"--corpus: {' and '.join(files.values())} differ in format; measure one after the other", 2)
    return {"use": next(iter(files)), "paths": globs, "validation_fraction": 0.0}


def _with_corpus(recipe: Recipe, corpus: dict[str, Any] | None) -> Recipe:
    """The recipe with another corpus in place of its data, which may be a store, or conversations or pairs of them."""
    if corpus is None:
        return recipe
    graph = recipe.graph
    # the sources of a mixture are written inside of it, and go with it
    names, tokens = (
        [name for name in graph.implementers(port) if not graph.nodes[name].owner] for port in (Corpus, TokenCorpus)
    )
    names = names or ["corpus"]
    changes: dict[str, Any] = dict.fromkeys(names, corpus)
    for name in tokens or ["tokens"]:
        changes[name] = {"use": "data.tokenized_text", "corpus": f"@{names[0]}"}
    for name in graph.implementers(PackedDataset):
        # rows of pairs, or of examples, which have a greatest length
        settings = graph.nodes[name].settings
        if has_pairs(graph.nodes[name].spec.cls) or "tokens" not in graph.nodes[name].edges:
            length = settings["length"] if "length" in settings else settings["max_length"]
            changes[name] = {"use": "data.packing.concatenated", "length": length}
    for name in graph.implementers(Loss):
        if has_pairs(graph.nodes[name].spec.cls):
            changes[name] = {"use": "loss.next_token"}
    for name, values in changes.items():
        recipe = recipe.with_values(nested(name, values), "--corpus")
    return recipe


def _batches(rows: PackedDataset, split: Split, size: int) -> Iterator[list[Batch]]:
    """All rows of a split in microbatches, some at a time."""
    starts = range(0, rows.count(split), size)
    indices = [range(start, min(start + size, rows.count(split))) for start in starts]
    for first in range(0, len(indices), AT_ONCE):
        yield [rows.batch(split, each) for each in indices[first : first + AT_ONCE]]


def _in_other_units(nats: float, weight: float, text_bytes: float) -> str:
    """The cross entropy in other units; nothing if the loss is of another kind."""
    if math.isnan(nats):
        return ""
    # Tokens at the end of a document stand for no byte, and are part of the loss.
    by_byte = f", {nats / math.log(2) / text_bytes:.4f} bits per byte" if text_bytes else ""
    return f", perplexity {math.exp(min(nats / weight, 700)):.4g}{by_byte}"
