"""A corpus of conversations, rendered by a chat template, of which some turns are trained."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs

from drawloom.components.data.chat.encode import Encoded, encode_completion, encode_rendered
from drawloom.components.data.chat.template import ChatTemplate, RenderError
from drawloom.components.data.chat.turns import Message, render_turns
from drawloom.components.data.sources.documents import split_of
from drawloom.components.data.sources.files import find, opened
from drawloom.components.data.store.shard import id_dtype
from drawloom.components.data.token_arrays import TokenArrays
from drawloom.components.ports.corpus import ChatTokenizer, Split
from drawloom.graph import UserError, between, component, setting

log = logging.getLogger("drawloom.data")

FORMS = '{"messages": [{"role": "user", "content": "..."}, ...]} or {"prompt": ..., "completion": ...}'


@component(needs={"jinja2": "drawloom[chat]"})
class Conversations:
    """
    Conversations in JSON-lines files, with the weights that their tokens have as targets.

    A line has `messages`, and as needed `tools`, in the form of Hugging Face's chat templates; or a `prompt` and a
    `completion`, both text or both messages, of which the completion is trained. A message's own `weight` comes before
    that of its role. A turn is trained up to its end token, and only if the template renders it the same way wherever
    it is (`components/data/chat/turns.py`). A line without a trained token is dropped, with a warning.
    """

    tokenizer: ChatTokenizer
    paths: list[str] = setting(
        check=lambda paths: None if paths else "an empty list names no file",
        doc="globs of JSON-lines files, relative to the current directory; `**` crosses folders",
    )
    template: Path | None = setting(
        default=None, doc="a file with a chat template in jinja2; the tokenizer's own if left out"
    )
    turns: Literal["all", "last", "one_row_per_turn"] = setting(
        default="all",
        doc="which turns of a conversation are trained; one_row_per_turn makes a row of each, with what came before it "
        "as it is rendered then",
    )
    roles: dict[str, float] = setting(
        factory=lambda: {"assistant": 1.0}, doc="the weight of the turns of each role; 0 for those that are left out"
    )
    date: str | None = setting(
        default=None, doc="what templates get that ask for today's date, as 2025-01-31; they fail if it is left out"
    )
    validation_fraction: float = setting(
        default=0.05, check=between(0, 1), doc="fraction of the lines to hold out for evaluation; 0: none"
    )
    _splits: dict[Split, TokenArrays] = attrs.field(init=False, factory=dict)
    _straddling: int = attrs.field(init=False, default=0)
    _untrained: int = attrs.field(init=False, default=0)

    def open(self) -> None:
        """Render and tokenize all conversations. Raises UserError with the file and the line of a bad one."""
        template = ChatTemplate(self._template(), self.tokenizer.template_tokens, self.date)
        template.open()
        try:
            rows: dict[Split, list[Encoded]] = {"train": [], "validation": []}
            for place, line in self._lines():
                kept = [row for row in self._rows(place, line, template) if row.weights[1:].any()]
                self._untrained += not kept
                rows[split_of(line, self.validation_fraction)] += kept
        finally:
            template.close()
        if not any(rows.values()):
            raise UserError(f"paths: no line has a turn to train; roles has {', '.join(self.roles) or 'none'}")
        self._splits = {split: self._arrays(each, split) for split, each in rows.items()}
        self._report(sum(map(len, rows.values())))

    def close(self) -> None:
        """Free the tokens."""
        self._splits = {}

    @property
    def vocab_size(self) -> int:
        """The tokenizer's."""
        return self.tokenizer.vocab_size

    @property
    def eos_id(self) -> int:
        """The tokenizer's."""
        return self.tokenizer.eos_id

    def documents(self, split: Split) -> TokenArrays:
        """The conversations of a split."""
        return self._splits[split]

    def files_read(self) -> dict[str, list[Path]]:
        """The template, if a file is named."""
        return {} if self.template is None else {"template": [self.template]}

    def _template(self) -> str:
        if self.template is not None:
            try:
                return self.template.read_text("utf-8")
            except OSError as error:
                raise UserError(f"template: {self.template} can't be read ({error.strerror})") from error
        if (text := self.tokenizer.chat_template) is None:
            raise UserError("template: the tokenizer has no chat template; write the path of one")
        return text

    def _lines(self) -> Iterator[tuple[str, bytes]]:
        """Each line that is not blank, after its file and number."""
        for file in find(self.paths):
            with opened(file) as stream:
                for number, line in enumerate(stream, 1):
                    if line.strip():
                        yield f"{file.path}:{number}", line

    def _rows(self, place: str, line: bytes, template: ChatTemplate) -> list[Encoded]:
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f"a line must be an object like {FORMS}")
            encoded = list(self._encoded(row, template))
        except (ValueError, RecursionError) as error:
            what = "the template refuses it: " if isinstance(error, RenderError) else ""
            raise UserError(f"{place}: {what}{error}") from error
        self._straddling += sum(each.straddles for each in encoded)
        return encoded

    def _encoded(self, row: Mapping[str, Any], template: ChatTemplate) -> Iterator[Encoded]:
        prompt, completion = row.get("prompt"), row.get("completion")
        if isinstance(prompt, str) and isinstance(completion, str):
            yield encode_completion(self.tokenizer, prompt, completion)
            return
        messages, weights = self._messages(row)
        tools = row.get("tools")
        for part, chosen in self._chosen(messages, weights):
            rendered = render_turns(template, part, chosen, tools)
            yield encode_rendered(self.tokenizer, rendered, part, tools)

    def _messages(self, row: Mapping[str, Any]) -> tuple[list[Message], list[float]]:
        """The messages of a line, and the weight of each."""
        if isinstance(row.get("prompt"), list) and isinstance(row.get("completion"), list):
            before, given = row["prompt"], row["completion"]
        elif isinstance(row.get("messages"), list):
            before, given = [], row["messages"]
        else:
            raise ValueError(f"it has {', '.join(row) or 'no keys'}; write {FORMS}")
        messages = [*before, *given]
        for number, message in enumerate(messages, 1):
            if not (isinstance(message, dict) and isinstance(message.get("role"), str)):
                raise ValueError(f'turn {number} is no object with a role; write {{"role": "user", "content": "..."}}')
        weights = [0.0] * len(before) + [self._weight(message) for message in given]
        return [{key: each for key, each in message.items() if key != "weight"} for message in messages], weights

    def _weight(self, message: Mapping[str, Any]) -> float:
        weight = message.get("weight", self.roles.get(message["role"], 0.0))
        if type(weight) not in (int, float) or not 0 <= weight < float("inf"):
            raise ValueError(f"a turn has weight {weight!r}; write 0, 1, or another number from 0 on")
        return float(weight)

    def _chosen(
        self, messages: list[Message], weights: list[float]
    ) -> Iterator[tuple[Sequence[Message], Sequence[float]]]:
        """The conversations that a line makes, each with the weights of its turns."""
        trained = [number for number, weight in enumerate(weights) if weight > 0]
        if self.turns == "all":
            yield messages, weights
            return
        for number in trained if self.turns == "one_row_per_turn" else trained[-1:]:
            yield messages[: number + 1], [*[0.0] * number, weights[number]]

    def _arrays(self, rows: Sequence[Encoded], split: Split) -> TokenArrays:
        dtype = id_dtype(self.vocab_size)
        weights = [row.weights for row in rows]
        return TokenArrays.of((row.ids for row in rows), dtype, weights, name=f"{split} conversation")

    def _report(self, rows: int) -> None:
        parts = self._splits.values()
        tokens = sum(len(each.ids) for each in parts)
        trained = sum(int((each.own_weights > 0).sum()) for each in parts if each.own_weights is not None)
        log.info("%d conversations of %d tokens, of which %d are trained", rows, tokens, trained)
        if self._untrained:
            log.warning("%d lines have no token to train, and are dropped", self._untrained)
        if self._straddling:
            log.info(
                "%d conversations have other ids than their text at once: where a turn begins, it is encoded anew, as "
                "when a model answers",
                self._straddling,
            )
