"""Recorded messages for faulty recipes."""

from pathlib import Path

import pytest

from support.golden import FAULTY, run_check

RECIPES = sorted(FAULTY.glob("*.toml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_faulty_recipe_prints_the_recorded_problems(recipe: Path) -> None:
    """`check` prints exactly the recorded problems with their positions, and no traceback."""
    text = run_check(recipe)
    assert "Traceback" not in text
    assert text == recipe.with_suffix(".txt").read_text("utf-8")


def test_there_are_at_least_120_faulty_recipes() -> None:
    """At least 120 faulty recipes exist; `tests/graph/test_codes.py` checks that they cover every code."""
    assert len(RECIPES) >= 120
