"""write DPO reference log-probabilities of preferences, computed by a recipe's initial model"""

import argparse
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drawloom.components.commands._options import add_batch_size_option, convert_write_errors, parse_writable_path
from drawloom.components.commands._recipes import add_overlay_option
from drawloom.components.data.chat.encode import Encoded
from drawloom.components.data.packing.rows import RowPiece, build_batch
from drawloom.components.data.preferences import REFERENCES, Preferences
from drawloom.components.data.store.shard import choose_id_dtype
from drawloom.components.data.token_arrays import TokenArrays
from drawloom.components.pipeline.executor import ProgramExecutor
from drawloom.components.pipeline.runtime.loss_passes import ReferenceWithoutAdapters
from drawloom.components.ports.data import TokenBatch
from drawloom.components.ports.pipeline import Referenced
from drawloom.components.storage.durable_files import replace_file
from drawloom.graph import UserError
from drawloom.graph.cli.result import Result, dump_json_line, output, output_class
from drawloom.graph.project import Project, Recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line arguments."""
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe with loss.dpo: a path, or a shipped name")
    add_overlay_option(parser)
    parser.add_argument(
        "--to", type=parse_writable_path, metavar="FILE", required=True, help="JSON-lines file to write"
    )
    add_batch_size_option(parser, "--pairs", "preference pairs")


@output_class
class ReferenceResult(Result):
    """A file with reference log-probabilities."""

    path: Path = output("written JSON-lines file")
    lines: int = output("number of lines")

    def render(self, format: str) -> str:
        """Return one line with the words that train with the file."""
        words = f"tokens.paths='[\"{self.path}\"]' loss.reference=data"
        return f"wrote {self.path}, {self.lines} lines; train with {words}"


def main(options: argparse.Namespace, project: Project) -> ReferenceResult:
    """Write the lines of the recipe's data with `ref_chosen_logps` and `ref_rejected_logps`."""
    if options.to.exists():
        raise UserError(f"--to: {options.to} exists; give the name of a new file", 2)
    recipe = Recipe.load(options.recipe, *options.words, overlays=options.overlay, project=project)
    names = [_find_only_node_of_class(recipe, port) for port in (ProgramExecutor, Preferences)]
    with recipe.open(names) as run:
        rows = _add_reference_logps(run.get(Preferences), run.get(ProgramExecutor), options.pairs)
        lines = [dump_json_line(row) for row in rows]
    with convert_write_errors(options.to):
        replace_file(options.to, "".join(f"{line}\n" for line in lines).encode())
    return ReferenceResult(options.to, len(lines))


def _find_only_node_of_class(recipe: Recipe, kind: type) -> str:
    """Return the name of the only node whose component is a subclass of `kind`. Raises UserError."""
    graph = recipe.graph.require_valid()
    names = [name for name, node in graph.nodes.items() if issubclass(node.spec.cls, kind)]
    if len(names) != 1:
        fault = f"the recipe has {len(names)} nodes that are a {kind.__name__}; exactly one is required"
        raise UserError(f"{fault}; use a recipe like `dpo`, with data.preferences and loss.dpo", 2)
    return names[0]


def _add_reference_logps(
    data: Preferences, executor: ProgramExecutor, lines_at_a_time: int
) -> Iterator[dict[str, Any]]:
    """Yield all data lines in order; pairs with added log-probabilities, computed for `lines_at_a_time` lines."""
    lines = data.encode_trained_documents_by_line()
    while batch := [*islice(lines, lines_at_a_time)]:
        pairs = [pair for _, pair in batch if pair]
        sums = iter(_sum_logps_by_answer(data, executor, pairs).tolist() if pairs else [])
        for line, pair in batch:
            yield line.row | (dict(zip(REFERENCES, next(sums), strict=True)) if pair else {})


def _sum_logps_by_answer(data: Preferences, executor: ProgramExecutor, pairs: Sequence[Sequence[Encoded]]) -> Tensor:
    """Return the log-probability of either answer (chosen, rejected), summed over its tokens: float64 (pairs, 2)."""
    answers = [answer for pair in pairs for answer in pair]
    ids, weights = [answer.ids for answer in answers], [answer.weights for answer in answers]
    documents = TokenArrays.concatenate(ids, choose_id_dtype(data.vocab_size), weights)
    rows = [[RowPiece(number, 0, len(answer_ids))] for number, answer_ids in enumerate(ids)]
    batch = build_batch(documents, rows, max(map(len, ids)), data.eos_id)
    if not isinstance(loss := executor.objective, Referenced):
        raise UserError("the recipe's loss has no reference model; use a recipe with loss.dpo", 2)
    inputs = executor.prepare_inputs([batch])
    if loss.reference == "data":
        inputs = ReferenceWithoutAdapters(loss).prepare_inputs(inputs, executor)
    prepared = inputs[0].batch
    if not isinstance(prepared, TokenBatch) or prepared.reference is None:
        raise UserError("the last pipeline stage is on another rank; write mesh.pipeline=1", 2)
    return prepared.reference.sum(1, dtype=torch.float64).view(-1, 2).cpu()
