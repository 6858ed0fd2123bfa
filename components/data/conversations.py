"""A corpus of conversations, rendered by a chat template, of which some turns are trained."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from drawloom.components.data.chat.corpus import ChatCorpus, check_messages, without
from drawloom.components.data.chat.encode import Encoded, encode_completion, encode_rendered
from drawloom.components.data.chat.template import ChatTemplate
from drawloom.components.data.chat.turns import Message, render_turns
from drawloom.graph import component, setting

FORMS = '{"messages": [{"role": "user", "content": "..."}, ...]} or {"prompt": ..., "completion": ...}'


@component(needs={"jinja2": "drawloom[chat]"})
class Conversations(ChatCorpus):
    """
    Conversations in JSON-lines, Parquet and Arrow files, with the weights that their tokens have as targets.

    A line has `messages`, and as needed `tools`, in the form of Hugging Face's chat templates; or a `prompt` and a
    `completion`, both text or both messages, of which the completion is trained. A message's own `weight` comes before
    that of its role. A turn is trained up to its end token, and only if the template renders it the same way wherever
    it is (`components/data/chat/turns.py`). A line without a trained token is dropped, with a warning.
    """

    turns: Literal["all", "last", "one_row_per_turn"] = setting(
        default="all",
        doc="which turns of a conversation are trained; one_row_per_turn makes a row of each, with what came before it "
        "as it is rendered then",
    )
    roles: dict[str, float] = setting(
        factory=lambda: {"assistant": 1.0}, doc="the weight of the turns of each role; 0 for those that are left out"
    )

    def encoded(self, row: Mapping[str, Any], template: ChatTemplate) -> Sequence[Encoded]:
        """The rows that a line makes. Raises ValueError for a line of another form."""
        prompt, completion = row.get("prompt"), row.get("completion")
        if isinstance(prompt, str) and isinstance(completion, str):
            return [encode_completion(self.tokenizer, prompt, completion)]
        messages, weights = self._messages(row)
        tools = row.get("tools")
        return [
            encode_rendered(self.tokenizer, render_turns(template, part, chosen, tools), part, tools)
            for part, chosen in self._chosen(messages, weights)
        ]

    def nothing_trained(self) -> str:
        """No role has a turn in any line."""
        return f"no line has a turn to train; roles has {', '.join(self.roles) or 'none'}"

    def _messages(self, row: Mapping[str, Any]) -> tuple[list[Message], list[float]]:
        """The messages of a line, and the weight of each."""
        if isinstance(row.get("prompt"), list) and isinstance(row.get("completion"), list):
            before, given = row["prompt"], row["completion"]
        elif isinstance(row.get("messages"), list):
            before, given = [], row["messages"]
        else:
            raise ValueError(f"it has {', '.join(row) or 'no keys'}; write {FORMS}")
        check_messages([*before, *given])
        weights = [0.0] * len(before) + [self._weight(message) for message in given]
        return [without(message, "weight") for message in (*before, *given)], weights

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
