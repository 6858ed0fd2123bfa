"""score answers with a run's reward model, or texts with its classifier"""

from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drawloom.components.commands._options import check_new_file, write_json_lines
from drawloom.components.commands._trained import (
    CheckpointCommand,
    CheckpointResult,
    find_chat_template,
    infer_documents,
    pad_documents,
)
from drawloom.components.data.chat.template import ChatTemplate, create_chat_template
from drawloom.components.data.feedback import encode_prompt_completion_row
from drawloom.components.data.labelled_texts import encode_text_or_messages
from drawloom.components.data.sources.formats import Line, read_json_lines_or_table_rows
from drawloom.components.pipeline.executor import ProgramExecutor
from drawloom.graph.cli.command import Count, Project, UserError, argument, command, option, output, output_class
from drawloom.ports import ChatTokenizer, Scorer


@output_class
class ScoreResult(CheckpointResult):
    """A file with scored answers."""

    path: Path = output("written JSON-lines file")
    scores: int = output("number of scored answers")

    def render(self, format: str) -> str:
        """Return one line."""
        return f"{self.origin}: wrote {self.path}, {self.scores} scores"


@command
class ScoreCommand(CheckpointCommand):
    """
    A file with the lines, each with its answer's `score`.

    An answer is a `completion` after its `prompt`; a line without a prompt has a `text` or `messages`. A classifier's
    lines have the likeliest `label` instead, and all labels' `probabilities`.
    """

    paths: Sequence[str] = argument("files or globs: JSON lines, Parquet, Arrow", metavar="PATH")
    to: Path = option("the JSON-lines file to write", metavar="FILE", check=check_new_file)
    template: Path | None = option("a chat template (default: the run's, or the tokenizer's)", metavar="FILE")
    rows: Count = option("answers per batch", default=8)

    def run(self, project: Project) -> ScoreResult:
        with self.open_run(project, ProgramExecutor, ChatTokenizer, Scorer) as run:
            tokenizer, scorer = run.nodes.get(ChatTokenizer), run.nodes.get(Scorer)
            with closing(create_chat_template(tokenizer, self.template or find_chat_template(run.nodes))) as template:
                lines = read_json_lines_or_table_rows(self.paths)
                encoded = ((line, _encode_line(tokenizer, line, template)) for line in lines)
                infer = partial(_score_at_last_token, run.nodes.get(ProgramExecutor), scorer)
                written = [
                    line.row | _make_score_or_label_fields(scores, scorer.output_names)
                    for (line, _), scores in infer_documents(encoded, self.rows, infer)
                ]
        write_json_lines(self.to, written)
        return ScoreResult(self.run_folder, run.step, self.to, len(written))


def _encode_line(tokenizer: ChatTokenizer, line: Line, template: ChatTemplate) -> Tensor:
    """Return a line's ids, int64 (tokens,). Raises UserError with the line's position if it is malformed."""
    try:
        if "prompt" in line.row:
            ids = encode_prompt_completion_row(tokenizer, line.row, template).ids
        else:
            ids = encode_text_or_messages(tokenizer, line.row, template)
    except ValueError as error:
        raise UserError(f"{line.position}: {error}") from error
    return torch.from_numpy(ids.astype("int64"))


def _make_score_or_label_fields(scores: Tensor, names: Sequence[str]) -> dict[str, Any]:
    """Return a line's new values, from its document's scores, float32 (names,)."""
    if len(names) == 1:
        return {"score": float(scores[0])}
    probabilities = dict(zip(names, scores.softmax(0).tolist(), strict=True))
    return {"label": names[int(scores.argmax())], "probabilities": probabilities}


def _score_at_last_token(
    executor: ProgramExecutor, scorer: Scorer, documents: Sequence[tuple[Line, Tensor]]
) -> Tensor | None:
    """Return documents' scores, float32 (documents, names), from their ids, int64 (tokens,)."""
    tokens, context = pad_documents([ids for _, ids in documents])
    scores = executor.infer(tokens, context, lambda hidden, _head: scorer.score_tokens(hidden))
    last = [len(ids) - 1 for _, ids in documents]
    return None if scores is None else scores.float().cpu()[torch.arange(len(last)), last]
