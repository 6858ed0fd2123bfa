"""Recorded results of resolving good recipes, which freeze the grammar of values."""

from pathlib import Path

import pytest

from support.golden import GOOD, resolve_recipe

RECIPES = sorted(GOOD.glob("*.toml"))
FROZEN = [recipe for recipe in RECIPES if recipe.with_suffix(".txt").exists()]


@pytest.mark.parametrize("recipe", FROZEN, ids=lambda path: path.stem)
def test_good_recipe_resolves_as_recorded(recipe: Path) -> None:
    """The resolved recipe equals the recorded one, with every line's origin, and has no problem."""
    assert resolve_recipe(recipe) == recipe.with_suffix(".txt").read_text("utf-8")


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe not in FROZEN], ids=lambda path: path.stem)
def test_recipes_extending_shipped_ones_have_no_problems(recipe: Path) -> None:
    """Users' extensions of shipped recipes stay valid; how they resolve may change with the shipped recipes."""
    assert resolve_recipe(recipe).startswith("format = 1\n")


def test_there_are_at_least_30_good_recipes() -> None:
    """At least 30 good recipes cover extends, overlays, groups, variables, inline nodes and values of all types."""
    assert len(RECIPES) >= 30
