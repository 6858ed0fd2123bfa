"""The meaning of good recipes, word for word: they freeze the grammar of values."""

from pathlib import Path

import pytest

from support.golden import GOOD, resolve_recipe

RECIPES = sorted(GOOD.glob("*.toml"))
FROZEN = [recipe for recipe in RECIPES if recipe.with_suffix(".txt").exists()]


@pytest.mark.parametrize("recipe", FROZEN, ids=lambda path: path.stem)
def test_a_good_recipe_resolves_as_in_the_golden_file(recipe: Path) -> None:
    """The resolved recipe is the recorded one, with the origin of every line, and there is no problem."""
    assert resolve_recipe(recipe) == recipe.with_suffix(".txt").read_text("utf-8")


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe not in FROZEN], ids=lambda path: path.stem)
def test_recipes_extending_shipped_ones_have_no_problems(recipe: Path) -> None:
    """Users' extensions of shipped recipes stay valid; how they resolve may change with the shipped recipes."""
    assert resolve_recipe(recipe).startswith("format = 1\n")


def test_there_are_at_least_30_good_recipes() -> None:
    """The corpus covers extending, overlays, groups, variables, nodes in place, and values of every type."""
    assert len(RECIPES) >= 30
