"""Common settings for rewards."""

from typing import Any

from drawloom import UserError, setting
from drawloom.graph import component_base_class
from drawloom.ports import Answer, Example


@component_base_class
class Weighted:
    """Base for rewards with a weight in the sum of all."""

    weight: float = setting("factor in the sum over all rewards; negative for a penalty", default=1.0)


@component_base_class
class ExpectedValueReward(Weighted):
    """Base for rewards that compare a completion with a value in the prompt's example."""

    key: str = setting("key of the example's expected value", default="answer")

    def check_example(self, example: Example) -> None:
        """Raise UserError, with its source, for an example without the expected value."""
        require_key(example, self.key, "write key = ... in the reward")

    def read_expected(self, answer: Answer) -> Any:
        """Return the expected value. Raises UserError, with the example's source, if the example has none."""
        self.check_example(answer.example)
        return answer.example[self.key]

    def read_expected_text(self, answer: Answer) -> str:
        """Return the expected text. Raises UserError for values other than texts."""
        value = self.read_expected(answer)
        if isinstance(value, str):
            return value
        source = answer.example.get("source", "an example")
        raise UserError(f"{source}: {self.key} is {value!r}; write a text", 2)


def require_key(example: Example, key: str, remedy: str) -> None:
    """Raise UserError, with its source, for an example without a key."""
    if key not in example:
        source, keys = example.get("source", "an example"), ", ".join(example)
        raise UserError(f"{source} has the keys {keys}, but not {key!r}; {remedy}", 2)
