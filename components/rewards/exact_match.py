"""Reward for the expected text."""

from collections.abc import Sequence

from drawloom.components.ports.rollouts import Answer
from drawloom.components.rewards.expected import ExpectedValueReward
from drawloom.graph import component


@component
class ExactMatch(ExpectedValueReward):
    """
    1 for a completion with an end token that equals the expected text, apart from surrounding white space; else 0.
    """

    def scores(self, answers: Sequence[Answer]) -> list[float]:
        return [
            float(answer.is_ended and answer.text.strip() == self.read_expected_text(answer).strip())
            for answer in answers
        ]
