"""write hidden states of documents, computed with a run's weights"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import attrs
import torch
from torch import Tensor

from drawloom.components.commands._options import check_new_file, convert_write_errors
from drawloom.components.commands._trained import CheckpointCommand, CheckpointResult, infer_documents, pad_documents
from drawloom.components.data.sources.files import find_files
from drawloom.components.data.sources.formats import split_files_into_parts
from drawloom.components.pipeline.executor import ProgramExecutor
from drawloom.components.storage.safetensors.writer import write_safetensors_file
from drawloom.graph.cli.command import (
    Count,
    Project,
    UserError,
    argument,
    command,
    option,
    output,
    output_class,
    print_escaped_text,
)
from drawloom.ports import HiddenStates, Model, Tokenizer, complete_prompt

POOLS: dict[str, Callable[[int], slice]] = {
    "mean": lambda length: slice(length),
    "first": lambda length: slice(min(length, 1)),
    "last": lambda length: slice(max(length - 1, 0), length),
}
"""Slice of a document's tokens whose hidden states are averaged, given the document's length."""


@output_class
class EmbedResult(CheckpointResult):
    """A file with the hidden states of documents."""

    path: Path = output("written safetensors file, with the tensor `hidden_states` of float32")
    shape: Sequence[int] = output("documents, layers, hidden size")
    empty_documents: int = output("documents without a token, whose numbers are 0")

    def render(self, format: str) -> str:
        """Return one line."""
        return f"{self.origin}: wrote {self.path}, {' x '.join(map(str, self.shape))} numbers"


@command
class EmbedCommand(CheckpointCommand):
    """A file with `hidden_states`, float32 (documents, layers, hidden_size), in document order."""

    paths: Sequence[str] = argument("files or globs: text, JSON lines, Parquet, Arrow", metavar="PATH")
    to: Path = option("safetensors file to write; it must not exist", metavar="FILE", check=check_new_file)
    layers: Sequence[int] = option("layers: 0 is the embedding, -1 the last", default=(-1,), metavar="N", nargs="+")
    pool: Literal["mean", "first", "last"] = option(
        "mean over a document's tokens, or its first or last token", default="mean"
    )
    field: str = option("field or column with the text", default="text", metavar="NAME")
    context: Count = option("first tokens of a document", default=1024)
    rows: Count = option("documents per batch", default=8)

    def run(self, project: Project) -> EmbedResult:
        texts = (
            document.text
            for part in split_files_into_parts(find_files(self.paths), self.field)
            for document in part.documents()
        )
        with self.open_run(project, ProgramExecutor, Tokenizer, Model) as run:
            layer_count = run.nodes.get(Model).num_hidden_layers
            request = HiddenStates(_resolve_negative_layers(self.layers, layer_count), documents=1)
            ids = (_encode_document_start(run.nodes.get(Tokenizer), text, self.context) for text in texts)
            infer = partial(_pool_hidden_states, run.nodes.get(ProgramExecutor), request, POOLS[self.pool])
            pooled = [*infer_documents(ids, self.rows, infer)]
        if not pooled:
            raise UserError(f"{' '.join(self.paths)}: the files contain no document; name other files", 2)
        empty = sum(not ids for ids, _ in pooled)
        if empty:
            print_escaped_text(f"documents without a token: {empty}; their hidden states are 0", "stderr")
        states = torch.stack([document_states for _, document_states in pooled])
        with convert_write_errors(self.to):
            write_safetensors_file(self.to, {"hidden_states": states})
        return EmbedResult(self.run_folder, run.step, self.to, list(states.shape), empty)


def _encode_document_start(tokenizer: Tokenizer, text: str, token_count: int) -> list[int]:
    """Return a document's first ids, without its end; none if the text has none."""
    ids = tokenizer.encode(text)
    return [int(token) for token in complete_prompt(tokenizer, ids)[:token_count]] if len(ids) else []


def _resolve_negative_layers(numbers: Sequence[int], layer_count: int) -> tuple[int, ...]:
    """Turn layer numbers from -`layer_count` - 1 to `layer_count` into numbers from 0. Raises UserError for others."""
    if unknown := [number for number in numbers if not -layer_count - 1 <= number <= layer_count]:
        raise UserError(
            f"--layers: there is no layer {unknown[0]}; the model has 0 to {layer_count}, and -1 is the last", 2
        )
    return tuple(number % (layer_count + 1) for number in numbers)


def _pool_hidden_states(
    executor: ProgramExecutor, request: HiddenStates, pool: Callable[[int], slice], documents: Sequence[Sequence[int]]
) -> Tensor | None:
    """Pool hidden states over documents' ids: float32 (documents, layers, hidden_size), zeros without ids."""
    tokens, context = pad_documents(documents)
    is_pooled = torch.zeros_like(tokens, dtype=torch.bool)
    for row, ids in zip(is_pooled, documents, strict=True):
        row[pool(len(ids))] = True
    context = attrs.evolve(context, hidden_states=request, mean_weights=is_pooled)
    # of a pair: the last hidden states, and the requested ones by layer
    states = executor.infer(tokens, context, lambda last_and_requested, _head: last_and_requested[1])
    if states is None:
        return None
    return torch.stack([states[layer][:, 0] for layer in request.layers], 1).float().cpu()
