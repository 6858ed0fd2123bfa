"""Common settings for rewards."""

from typing import Any

from drawloom.components.ports.rollouts import Answer
from drawloom.graph import UserError, component_base_class, setting


@component_base_class
class Weighted:
    """Base for rewards with a weight in the sum of all."""

    weight: float = setting(default=1.0, doc="factor in the sum over all rewards; negative for a penalty")


@component_base_class
class ExpectedValueReward(Weighted):
    """Base for rewards that compare a completion with a value in the prompt's example."""

    key: str = setting(default="answer", doc="key of the example's expected value")

    def read_expected(self, answer: Answer) -> Any:
        """Return the expected value. Raises UserError, with the example's source, if the example has none."""
        if self.key in answer.example:
            return answer.example[self.key]
        source, keys = answer.example.get("source", "an example"), ", ".join(answer.example)
        raise UserError(f"{source} has the keys {keys}, but not {self.key!r}; write key = ... in the reward", 2)

    def read_expected_text(self, answer: Answer) -> str:
        """Return the expected text. Raises UserError for values other than texts."""
        value = self.read_expected(answer)
        if isinstance(value, str):
            return value
        source = answer.example.get("source", "an example")
        raise UserError(f"{source}: {self.key} is {value!r}; write a text", 2)
