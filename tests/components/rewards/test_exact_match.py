"""Reward for the expected text."""

import re
from typing import Any

import pytest

from drawloom.components.rewards.exact_match import ExactMatch
from drawloom.graph import UserError
from support.rewards import answer


def test_exact_match_ignores_white_space_around_and_needs_the_end() -> None:
    """Only the expected text, ended by the model itself, is right; an empty answer to a text is wrong."""
    answers = [answer(text, answer="01 2") for text in ("01 2", " 01 2\n", "012", "01 2 3", "")]
    assert ExactMatch().scores([*answers, answer("01 2", is_ended=False, answer="01 2")]) == [1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("example", "message"),
    [({}, "a.jsonl:3 has the keys source, but not 'answer'"), ({"answer": 3}, "a.jsonl:3: answer is 3; write a text")],
)
def test_an_example_without_the_expected_text_is_named(example: dict[str, Any], message: str) -> None:
    """A reward with nothing to compare names the example's line."""
    with pytest.raises(UserError, match=re.escape(message)):
        ExactMatch().scores([answer("x", is_ended=False, **example)])
