"""write DPO reference log-probabilities of preferences, computed by a recipe's initial model"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from drawloom.components.commands._options import check_new_file, write_json_lines
from drawloom.components.commands._recipes import find_only_node
from drawloom.components.commands._trained import infer_documents
from drawloom.components.data.chat.encode import Encoded
from drawloom.components.data.packing.batches import build_batch
from drawloom.components.data.packing.pieces import RowPiece
from drawloom.components.data.preferences import REFERENCES, Preferences
from drawloom.components.data.sources.formats import Line
from drawloom.components.data.store.store import choose_id_dtype
from drawloom.components.data.token_arrays import TokenArrays
from drawloom.components.pipeline.executor import ProgramExecutor
from drawloom.components.pipeline.runtime.loss_passes import add_values_without_adapters
from drawloom.graph.cli.command import (
    Count,
    Project,
    RecipeCommand,
    Result,
    UserError,
    argument,
    command,
    option,
    output,
    output_class,
)
from drawloom.ports import Referenced, TokenBatch


@output_class
class ReferenceResult(Result):
    """A file with reference log-probabilities."""

    path: Path = output("written JSON-lines file")
    lines: int = output("number of lines")

    def render(self, format: str) -> str:
        """Return one line with the words that train with the file."""
        words = f"tokens.paths='[\"{self.path}\"]' loss.reference=data"
        return f"wrote {self.path}, {self.lines} lines; train with {words}"


@command
class ReferenceLogpsCommand(RecipeCommand):
    """A file with the lines of the recipe's data, `ref_chosen_logps` and `ref_rejected_logps`."""

    recipe: str = argument("a recipe with loss.dpo: a path, or a shipped name")
    to: Path = option("JSON-lines file to write", metavar="FILE", check=check_new_file)
    pairs: Count = option("preference pairs per batch", default=8)

    def run(self, project: Project) -> ReferenceResult:
        recipe = self.load_recipe(project, self.recipe)
        graph = recipe.graph.require_valid()
        names = [find_only_node(graph, kind, self.recipe) for kind in (ProgramExecutor, Preferences)]
        with recipe.open(names) as run:
            data = run.get(Preferences)
            infer = partial(_sum_logps_by_answer, data, run.get(ProgramExecutor))
            documents = infer_documents(data.encode_trained_documents_by_line(), self.pairs, infer)
            rows = [line.row | dict(zip(REFERENCES, sums, strict=False)) for (line, _), sums in documents]
        write_json_lines(self.to, rows)
        return ReferenceResult(self.to, len(rows))


def _sum_logps_by_answer(
    data: Preferences, executor: ProgramExecutor, lines: Sequence[tuple[Line, Sequence[Encoded]]]
) -> Iterator[Sequence[float]] | None:
    """Return either answer's summed log-probability (chosen, rejected); none for a line without a pair."""
    answers = [answer for _, pair in lines for answer in pair]
    if not answers:
        return (() for _ in lines)
    ids, weights = [answer.ids for answer in answers], [answer.weights for answer in answers]
    documents = TokenArrays.concatenate(ids, choose_id_dtype(data.vocab_size), weights)
    rows = [[RowPiece(number, 0, len(answer_ids))] for number, answer_ids in enumerate(ids)]
    batch = build_batch(documents, rows, max(map(len, ids)), data.eos_id)
    if not isinstance(loss := executor.objective, Referenced):
        raise UserError("the recipe's loss has no reference model; use a recipe with loss.dpo", 2)
    inputs = executor.prepare_inputs([batch])
    if loss.reference == "data":
        inputs = add_values_without_adapters(loss, inputs, executor)
    prepared = inputs[0].batch
    if not isinstance(prepared, TokenBatch) or prepared.reference is None:
        return None
    sums = iter(prepared.reference.sum(1, dtype=torch.float64).view(-1, 2).tolist())
    return (next(sums) if pair else () for _, pair in lines)
