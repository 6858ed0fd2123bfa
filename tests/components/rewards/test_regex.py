"""Reward for a format."""

from drawloom.components.rewards.regex import Regex
from support.rewards import answer


def test_a_regular_expression_is_searched_in_all_lines() -> None:
    """Anchors bind a pattern to the whole completion, and a dot is also a line end."""
    pattern = r"\A<think>.*</think>\s*\S+\Z"
    texts = ("<think>a\nb</think> 3", "<think>a\nb 3", "x <think></think> 3")
    assert Regex(pattern=pattern).scores([answer(text) for text in texts]) == [1, 0, 0]
