"""Common settings for rewards."""

from typing import Any

from drawloom import UserError, setting
from drawloom.graph import component_base_class
from drawloom.ports import Answer


@component_base_class
class Weighted:
    """Base for rewards with a weight in the sum of all."""

    weight: float = setting("factor in the sum over all rewards; negative for a penalty", default=1.0)


@component_base_class
class ExpectedValueReward(Weighted):
    """Base for rewards that compare a completion with a value in the prompt's example."""

    key: str = setting("key of the example's expected value", default="answer")

    def read_expected(self, answer: Answer) -> Any:
        """Return the expected value. Raises UserError, with the example's source, if the example has none."""
        return read_key(answer, self.key, "write key = ... in the reward")

    def read_expected_text(self, answer: Answer) -> str:
        """Return the expected text. Raises UserError for values other than texts."""
        value = self.read_expected(answer)
        if isinstance(value, str):
            return value
        source = answer.example.get("source", "an example")
        raise UserError(f"{source}: {self.key} is {value!r}; write a text", 2)


def read_key(answer: Answer, key: str, remedy: str) -> Any:
    """Return a key's value in the prompt's example. Raises UserError, with its source, if the example lacks it."""
    if key in answer.example:
        return answer.example[key]
    source, keys = answer.example.get("source", "an example"), ", ".join(answer.example)
    raise UserError(f"{source} has the keys {keys}, but not {key!r}; {remedy}", 2)
