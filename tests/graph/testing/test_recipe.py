"""A part of a recipe in a test."""

from typing import Any

import pytest

from drawloom.graph.problems import RecipeError
from drawloom.graph.testing import Recipe, fake
from support.shop.ports import Store


def test_only_what_one_node_needs_is_opened_with_what_is_given() -> None:
    """The closure of one node is built, around a fake that is checked against its port."""
    store = fake(Store, get="there")
    with Recipe.load("small", package="support.shop").open(only="page", given={"store": store}) as objects:
        assert set(objects) == {"store", "page"}
        assert objects["page"].answer("home") == "Shop: there"
    with pytest.raises(TypeError, match="does not fit"):
        Recipe.load("small", package="support.shop").open(given={"store": 3}).build()


def test_values_make_another_recipe() -> None:
    """The first stays as it was."""
    small = Recipe.load("small", package="support.shop")
    kiosk = small.with_values({"page": {"title": "Kiosk"}})
    titles: list[Any] = []
    for recipe in (small, kiosk):
        with recipe.open() as objects:
            titles.append(objects["page"].title)
    assert titles == ["Shop", "Kiosk"]


def test_a_faulty_recipe_is_not_opened() -> None:
    """All problems come out, as from `check`."""
    recipe = Recipe.of({"store": {"use": "stores.memory", "size": "x"}}, package="support.shop")
    with pytest.raises(RecipeError, match="size"):
        recipe.open(only="store")
