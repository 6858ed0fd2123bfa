"""Rewards that are plain functions."""

from pathlib import Path

import pytest

from drawloom import Recipe, UserError, reward
from drawloom.components.ports.rollouts import Answer, Reward
from drawloom.graph.types.port_match import find_mismatches

FILE = """
from drawloom import reward

@reward
def shared(completion, answer):
    return float(answer in completion)

@reward
def short(completion, limit: int = 6):
    return -max(0.0, len(completion) - limit)
"""


@reward
def overlap(completion: str, answer: str, least: float = 0.5) -> float | None:
    """The answer's share of letters in the completion; None below `least`."""
    share = sum(letter in completion for letter in answer) / len(answer)
    return share if share >= least else None


def test_a_function_scores_texts_with_keys_of_examples_and_settings() -> None:
    """Parameters without default are the example's keys, others are settings; None is no score."""
    assert find_mismatches(overlap, Reward) == []
    answers = [Answer(text, 3, True, {"answer": "abcd"}) for text in ("abcd", "ab", "a")]
    assert overlap().scores(answers) == [1.0, 0.5, None]
    assert overlap(least=0.0, weight=-2.0).scores(answers) == [1.0, 0.5, 0.25]
    with pytest.raises(UserError, match=r"row 7 has the keys source, but not 'answer'; add it, or give answer a defau"):
        overlap().scores([Answer("a", 1, True, {"source": "row 7"})])
    with pytest.raises(UserError, match="row 7 has the keys source, but not 'answer'"):
        overlap().check_example({"source": "row 7"})
    for function in (lambda: 0.0, lambda text, **keys: 0.0):
        with pytest.raises(TypeError, match=r"takes the completion's text, and then keys of the example by name"):
            reward(function)
    for named_like_ours in (lambda text, weight=1.0: weight, lambda text, options=3: options):
        with pytest.raises(TypeError, match=r"has a setting (weight|options) of its own; write another name"):
            reward(named_like_ours)


def test_a_file_has_rewards_by_function(tmp_path: Path) -> None:
    """Several functions of one imported file are `file.function`, with checked settings, and others are refused."""
    (tmp_path / "scores_of_tests.py").write_text(FILE, "utf-8")

    def check(*values: str) -> list[str]:
        words = ("vars.base=unused", *(f"rewards.mine.{value}" for value in values))
        recipe = Recipe.load("grpo", *words, imports=str(tmp_path / "scores_of_tests.py"))
        return [problem.text for problem in recipe.graph.problems if problem.node == "rewards.mine"]

    assert check("use=scores_of_tests.short", "limit=4") == []
    assert check("use=scores_of_tests.short", "limit=x") == ['limit: expected an integer, got the string "x"']
    assert check("use=scores_of_tests.shor")[0].startswith("no component is called 'scores_of_tests.shor'")
