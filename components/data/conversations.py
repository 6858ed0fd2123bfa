"""Conversation corpus, rendered by a chat template, with a choice of trained turns."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

from drawloom import component, setting
from drawloom.components.data.chat.corpus import ChatCorpus
from drawloom.components.data.chat.encode import (
    Encoded,
    encode_conversation,
    encode_prompt_and_completion,
    join_prompt_and_answer,
)
from drawloom.components.data.chat.template import ChatTemplate
from drawloom.components.data.chat.turns import Message

FORMS = '{"messages": [{"role": "user", "content": "..."}, ...]} or {"prompt": ..., "completion": ...}'


@component(needs={"jinja2": "drawloom[chat]"})
class Conversations(ChatCorpus):
    """
    Conversations in JSON-lines, Parquet and Arrow files, with a loss weight per token.

    A line has `messages` and optionally `tools`, in the format for Hugging Face's chat templates; or a `prompt` and
    a trained `completion`, either both text or both messages. A message's `weight` overrides its role's weight. An
    answer is trained up to its end token, or the first control token of the next turn, and only if the template renders
    it the same way in every position (`components/data/chat/turns.py`). A line without a trained token is dropped, with
    a warning.
    """

    answers_prompts: ClassVar[bool] = True
    earlier_turn_remedy: ClassVar[str] = 'write turns = "last" or turns = "one_row_per_turn"'

    turns: Literal["all", "last", "one_row_per_turn"] = setting(
        "trained turns in a conversation; one_row_per_turn makes one row per trained turn, ending with it",
        default="all",
    )
    roles: dict[str, float] = setting(
        "loss weight by role; other roles are not trained", factory=lambda: {"assistant": 1.0}
    )

    def encode_row(self, row: Mapping[str, Any], template: ChatTemplate) -> Sequence[Encoded]:
        prompt, completion = row.get("prompt"), row.get("completion")
        if isinstance(prompt, str) and isinstance(completion, str):
            return [encode_prompt_and_completion(self.tokenizer, prompt, completion)]
        messages, weights = self._read_messages_and_weights(row)
        return [
            encode_conversation(self.tokenizer, template, part, part_weights, row.get("tools"))
            for part, part_weights in self._split_into_trained_conversations(messages, weights)
        ]

    def format_nothing_trained_error(self) -> str:
        return f"no line has a turn to train; roles has {', '.join(self.roles) or 'none'}"

    def _read_messages_and_weights(self, row: Mapping[str, Any]) -> tuple[Sequence[Message], list[float]]:
        """Return a line's messages and their weights."""
        if isinstance(row.get("prompt"), list) and isinstance(row.get("completion"), list):
            prompt, trained = row["prompt"], row["completion"]
        elif isinstance(row.get("messages"), list):
            prompt, trained = [], row["messages"]
        else:
            raise ValueError(f"it has {', '.join(row) or 'no keys'}; write {FORMS}")
        joined = join_prompt_and_answer(prompt, trained)
        weights = [0.0] * len(prompt) + [self._get_turn_weight(message) for message in trained]
        messages = [{key: value for key, value in message.items() if key != "weight"} for message in joined]
        return messages, weights

    def _get_turn_weight(self, message: Mapping[str, Any]) -> float:
        """
        Return a trained message's weight, its own or its role's. Raises ValueError if it is negative or not finite.
        """
        weight = message.get("weight", self.roles.get(message["role"], 0.0))
        if type(weight) not in (int, float) or not 0 <= weight < float("inf"):
            raise ValueError(f"a turn has weight {weight!r}; write 0, 1, or another number from 0 on")
        return float(weight)

    def _split_into_trained_conversations(
        self, messages: Sequence[Message], weights: list[float]
    ) -> Iterator[tuple[Sequence[Message], Sequence[float]]]:
        """
        Yield messages and turn weights to encode: the whole conversation, or, as `turns` says, beginnings up to a
        trained turn.
        """
        trained = [index for index, weight in enumerate(weights) if weight > 0]
        if self.turns == "all":
            yield messages, weights
            return
        for index in trained if self.turns == "one_row_per_turn" else trained[-1:]:
            yield messages[: index + 1], [*[0.0] * index, weights[index]]
