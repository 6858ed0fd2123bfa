"""Collator of prompts, texts or conversations, for rollouts."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch

from drawloom import component, wired
from drawloom.components.data.chat.encode import PromptRenderer, encode_prompt_messages
from drawloom.ports import Batch, ChatTokenizer, Environment, Example, PromptBatch, complete_prompt, find_end_ids


@component
class PromptCollator(PromptRenderer):
    """
    Rows of prompts, one per example, with the example for the rewards.

    An example has a `prompt`: a text, or a list of messages; the chat template renders them up to
    the answer's beginning. A completion of messages ends at the template's control token after an answer, too.
    Messages are rendered with the example's `tools`, or the environment's.
    """

    environment: Environment | None = wired(default=None)

    batch_type: ClassVar[type[Batch]] = PromptBatch

    def count_tokens(self, example: Example) -> int:
        """Count a prompt's tokens. Raises ValueError for an example without a prompt, or with an empty one."""
        return len(self._encode_prompt(example))

    def collate(self, examples: Sequence[Example], length: int) -> PromptBatch:
        """Return rows for prompts with at most `length` tokens, padded with the end token."""
        ids = [self._encode_prompt(example) for example in examples]
        tokens = np.full((len(ids), length), self.tokenizer.eos_id, np.int64)
        for row, prompt in zip(tokens, ids, strict=True):
            row[: len(prompt)] = prompt
        lengths = torch.tensor([len(prompt) for prompt in ids])
        ends = tuple(
            self.answer_end_ids if isinstance(example["prompt"], list) else find_end_ids(self.tokenizer)
            for example in examples
        )
        return PromptBatch(torch.from_numpy(tokens), lengths, torch.ones(len(ids)), tuple(examples), ends)

    @cached_property
    def _tool_schemas(self) -> list[dict[str, Any]] | None:
        """The environment's functions; None without any."""
        return [dict(schema) for schema in self.environment.tool_schemas] or None if self.environment else None

    def __getstate__(self) -> dict[str, Any]:
        """Return what worker processes need: they do not talk to the environment."""
        return {**super().__getstate__(), "_tool_schemas": self._tool_schemas, "environment": None}

    def _encode_prompt(self, example: Mapping[str, Any]) -> np.ndarray:
        """Encode a prompt, int32 (tokens,). Raises ValueError if it is missing or empty."""
        prompt = example.get("prompt")
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt)
            if len(ids):
                ids = complete_prompt(self.tokenizer, ids)
        elif isinstance(prompt, list):
            if not isinstance(self.tokenizer, ChatTokenizer):
                raise ValueError("its prompt has messages, and the tokenizer has no chat template; write a text")
            template, tools = self.get_or_create_chat_template(self.tokenizer), example.get("tools")
            ids = encode_prompt_messages(self.tokenizer, template, prompt, tools or self._tool_schemas)
        else:
            raise ValueError(f"it has {', '.join(example) or 'no keys'}; write a prompt, a text or a list of messages")
        if not len(ids):
            raise ValueError("its prompt is empty; write at least one token")
        return ids
