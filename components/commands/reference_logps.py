"""write DPO reference log-probabilities of preferences, computed by a recipe's initial model"""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drawloom.components.commands._options import check_new_file, convert_write_errors
from drawloom.components.data.chat.encode import Encoded
from drawloom.components.data.packing.rows import RowPiece, build_batch
from drawloom.components.data.preferences import REFERENCES, Preferences
from drawloom.components.data.store.shard import choose_id_dtype
from drawloom.components.data.token_arrays import TokenArrays
from drawloom.components.pipeline.executor import ProgramExecutor
from drawloom.components.storage.durable_files import replace_file
from drawloom.graph import UserError
from drawloom.graph.cli.command import RecipeCommand, argument, command, option
from drawloom.graph.cli.result import Result, dump_json_line, output, output_class
from drawloom.graph.component import at_least
from drawloom.graph.project import Project, Recipe


@output_class
class ReferenceResult(Result):
    """A file with reference log-probabilities."""

    path: Path = output("written JSON-lines file")
    lines: int = output("number of lines")

    def render(self, format: str) -> str:
        """Return one line with the words that train with the file."""
        words = f"tokens.paths='[\"{self.path}\"]' loss.reference=data"
        return f"wrote {self.path}, {self.lines} lines; train with {words}"


@command("data")
class ReferenceLogpsCommand(RecipeCommand):
    """A file with the lines of the recipe's data, `ref_chosen_logps` and `ref_rejected_logps`."""

    recipe: str = argument("a recipe with loss.dpo: a path, or a shipped name")
    to: Path = option("JSON-lines file to write", metavar="FILE", check=check_new_file)
    pairs: int = option("preference pairs per batch", default=8, check=at_least(1))

    def run(self, project: Project) -> ReferenceResult:
        recipe = self.load_recipe(project, self.recipe)
        names = [_find_only_node_of_class(recipe, port) for port in (ProgramExecutor, Preferences)]
        with recipe.open(names) as run:
            rows = _add_reference_logps(run.get(Preferences), run.get(ProgramExecutor), self.pairs)
            lines = [dump_json_line(row) for row in rows]
        with convert_write_errors(self.to):
            replace_file(self.to, "".join(f"{line}\n" for line in lines).encode())
        return ReferenceResult(self.to, len(lines))


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
    if (logps := executor.reference_token_logps(batch)) is None:
        raise UserError("the last pipeline stage is on another rank; write mesh.pipeline=1", 2)
    return logps.sum(1, dtype=torch.float64).view(-1, 2).cpu()
