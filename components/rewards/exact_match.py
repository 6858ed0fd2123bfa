"""Reward for the expected text."""

from collections.abc import Sequence

from drawloom import component
from drawloom.components.rewards.expected import ExpectedValueReward
from drawloom.ports import Answer


@component
class ExactMatch(ExpectedValueReward):
    """
    1 for a completion with an end token that equals the expected text, apart from surrounding white space; else 0.
    """

    def scores(self, answers: Sequence[Answer]) -> list[float]:
        return [
            float(self.read_expected_text(answer).strip() == answer.text.strip() and answer.is_ended)
            for answer in answers
        ]
