"""What is printed for faulty recipes, word for word."""

from pathlib import Path

import pytest

from support.golden import FAULTY, run_check

RECIPES = sorted(FAULTY.glob("*.toml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_problem_is_printed_as_in_the_golden_file(recipe: Path) -> None:
    """`check` prints exactly the recorded problems, each with its place, and no traceback."""
    text = run_check(recipe)
    assert "Traceback" not in text
    assert text == recipe.with_suffix(".txt").read_text("utf-8")


def test_there_are_at_least_120_faulty_recipes() -> None:
    """The corpus covers every kind of problem; `tests/graph/test_codes.py` sees to that."""
    assert len(RECIPES) >= 120
