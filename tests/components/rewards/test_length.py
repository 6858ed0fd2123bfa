"""Penalty for length."""

from drawloom.components.rewards.length import Length
from support.rewards import answer


def test_length_falls_over_the_buffer() -> None:
    """DAPO's penalty: 0, then a line to -1, then -1."""
    reward = Length(max_tokens=10, buffer=4)
    assert reward.scores([answer("x", tokens) for tokens in (1, 6, 7, 9, 10, 99)]) == [0, 0, -0.25, -0.75, -1, -1]
