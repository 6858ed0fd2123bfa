"""write a teacher's likeliest next tokens for the rows of a recipe's data"""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from drawloom.components.commands._options import check_new_file, convert_write_errors
from drawloom.components.commands._recipes import find_only_node
from drawloom.components.commands._trained import infer_documents
from drawloom.components.data.packing.packed_rows import SPLITS, PackedRows
from drawloom.components.data.teacher_logps import MANIFEST
from drawloom.components.pipeline.executor import ProgramExecutor
from drawloom.components.storage.durable_files import replace_file
from drawloom.components.weights.token_ids import TokenIds, compare_folder_ids, read_tokenizer_ids
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
from drawloom.graph.cli.json_text import dump_json
from drawloom.ports import Head, Split, TokenContext, Tokenizer

MAX_CHUNK_LOGITS = 2**26
"""Logits that exist together: 256 MiB of float32."""

log = logging.getLogger("drawloom.data")

FLOOR = float(np.finfo(np.float16).min)
"""Log-probability of no token at all, where the k likeliest tokens are the whole vocabulary."""


@output_class
class TeacherResult(Result):
    """A folder with a teacher's likeliest tokens."""

    folder: Path = output("written folder")
    rows: Mapping[str, int] = output("number of rows by split")
    top_k: int = output("tokens by position")

    def render(self, format: str) -> str:
        """Return one line with the counts."""
        counts = ", ".join(f"{count} rows of {split}" for split, count in self.rows.items())
        return f"wrote {self.folder}: {counts}, {self.top_k} tokens by position"


@command
class TeacherLogpsCommand(RecipeCommand):
    """A folder with ids and log-probabilities of both splits; the manifest is written last."""

    recipe: str = argument("a path, or the name of a shipped recipe, with the teacher")
    to: Path = option("the folder to write", metavar="FOLDER", check=check_new_file)
    top_k: Count = option("tokens by position", default=64, metavar="K")
    rows: Count = option("rows per batch", default=8)

    def run(self, project: Project) -> TeacherResult:
        recipe = self.load_recipe(project, self.recipe)
        graph = recipe.graph.require_valid()
        names = [find_only_node(graph, port, self.recipe) for port in (ProgramExecutor, PackedRows)]
        tokenizers = graph.implementers(Tokenizer)[:1]
        with recipe.open([*names, *tokenizers]) as run:
            rows, executor = run.get(PackedRows), run.get(ProgramExecutor)
            known_ids = _read_ids_in_common(executor, run[tokenizers[0]]) if tokenizers else None
            counts: dict[str, int] = {split: rows.count_rows(split) for split in SPLITS}
            with convert_write_errors(self.to):
                self.to.mkdir(parents=True)
                for split in SPLITS:
                    infer = partial(_predict_top_ids_and_logps, executor, rows, split, self.top_k)
                    with (self.to / f"{split}.ids").open("wb") as ids, (self.to / f"{split}.logps").open("wb") as logps:
                        for _, row in infer_documents(range(rows.count_rows(split)), self.rows, infer):
                            ids.write(row[:, : self.top_k].numpy().astype(np.int32).tobytes())
                            top_logps = row[:, self.top_k :].clamp_min(FLOOR).numpy().astype(np.float16)
                            logps.write(top_logps.tobytes())
                identity = {"rows": rows.identity(), "tokenizer": known_ids and known_ids.fingerprint}
                manifest = {**identity, "length": rows.length, "top_k": self.top_k}
                replace_file(self.to / MANIFEST, dump_json(manifest).encode())
        return TeacherResult(self.to, counts, self.top_k)


def _read_ids_in_common(executor: ProgramExecutor, tokenizer: Tokenizer) -> TokenIds | None:
    """
    Check that the teacher's folder has the tokenizer's ids, and return them; None if they are unknown.

    Raises UserError if the folder has another tokenizer.
    """
    folder = executor.stages.initial_folder
    if folder is not None and (warning := compare_folder_ids(folder, tokenizer)):
        log.warning("%s", warning)
    return read_tokenizer_ids(tokenizer)


def _predict_top_ids_and_logps(
    executor: ProgramExecutor, rows: PackedRows, split: Split, top_k: int, indices: Sequence[int]
) -> Tensor | None:
    """Return ids and logps of rows: float64 (rows, length, 2 k + 1)."""

    def compute_top_ids_and_logps(hidden: Tensor, head: Head) -> Tensor:
        # Padding rows of the vocabulary are nobody's prediction.
        ids = rows.tokens.vocab_size
        return torch.stack([_compute_top_logps(row, head, top_k, ids) for row in hidden])

    batch = rows.batch(split, indices)
    context = TokenContext(batch.positions, batch.document_ids)
    outputs = executor.infer(batch.tokens, context, compute_top_ids_and_logps)
    return None if outputs is None else outputs.cpu()


def _compute_top_logps(hidden: Tensor, head: Head, top_k: int, id_count: int) -> Tensor:
    """
    Return the k likeliest ids, their logps, and the logp for the others of `id_count`: float64 (length, 2 k + 1).
    """
    parts, step = [], max(1, MAX_CHUNK_LOGITS // head.logits(hidden[:1]).shape[-1])
    for chunk in torch.split(hidden, step):
        logits = head.logits(chunk)[:, :id_count].float()
        if top_k > logits.shape[-1]:
            raise UserError(f"--top-k {top_k} is more than the vocabulary of {logits.shape[-1]}; write less", 2)
        logps = logits.log_softmax(-1).double()
        top = logps.topk(top_k)
        rest = logps.scatter(-1, top.indices, -torch.inf).logsumexp(-1, keepdim=True)
        parts.append(torch.cat([top.indices.double(), top.values, rest], -1))
    return torch.cat(parts)
