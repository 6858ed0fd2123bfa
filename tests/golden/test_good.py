"""What good recipes mean, word for word: the grammar of values is frozen by them."""

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
def test_recipes_that_extend_what_ships_have_no_problems(recipe: Path) -> None:
    """What people do with shipped recipes stays possible; how it resolves may change with what ships."""
    assert resolve_recipe(recipe).startswith("format = 1\n")


def test_there_are_at_least_30_good_recipes() -> None:
    """The corpus covers extending, overlays, groups, variables, nodes in place, and values of every type."""
    assert len(RECIPES) >= 30
