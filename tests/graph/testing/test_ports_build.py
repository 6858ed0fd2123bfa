"""Single components, built without a recipe."""

from pathlib import Path
from typing import Any

import attrs
import pytest

from drawloom.graph.problems import RecipeError
from drawloom.graph.testing import build, fake
from support.shop.components.servers.loop import Loop
from support.shop.components.stores.varied import Colour, Shelf
from support.shop.ports import Page, Store

SHOP = {"package": "support.shop"}


def test_build_accepts_python_values_and_recipe_values() -> None:
    """Python values and recipe values are checked and converted to the same values."""
    python = build("stores.varied", path=Path("x"), colour=Colour.BLUE, shelf=Shelf(3), pair=(1, 2), text="@x", **SHOP)
    written = build("stores.varied", path="x", colour="blue", shelf={"width": 3}, pair=[1, 2], text="@x", **SHOP)
    assert attrs.asdict(python) == attrs.asdict(written)
    assert (python.shelf, python.pair, python.text) == (Shelf(3), (1, 2.0), "@x")


@pytest.mark.parametrize(
    ("component", "values", "texts"),
    [
        ("stores.memory", {"size": "big"}, ['size: expected an integer, got the string "big"']),
        ("stores.memory", {"size": 0, "sice": 3}, ["size: 0 is less than 1", "no setting or edge 'sice'"]),
        ("stores.memory", {"size": None}, ["size: expected an integer, got nothing"]),
        ("pages.plain", {}, ["needs the setting 'title'", "needs Store for 'store'"]),
        ("pages.plain", {"title": "x", "store": object()}, ["store needs Store, but object has no get()"]),
        ("pages.plain", {"title": "x", "store": fake(Store), "filters": [3]}, ["filters needs Filter, but int has no"]),
        ("stores.odd", {"fails": False, "number": 3}, ["can't be read"]),
        ("stores.momery", {}, ["no component is called 'stores.momery'"]),
    ],
)
def test_build_raises_all_problems_at_once(component: str, values: dict[str, Any], texts: list[str]) -> None:
    """`build` raises the problems that `check` would print for a recipe."""
    with pytest.raises(RecipeError) as caught:
        build(component, **values, **SHOP)
    printed = [str(problem) for problem in caught.value.problems]
    assert len(printed) == len(texts)
    assert all(any(text in line for line in printed) for text in texts), printed


def test_build_accepts_a_class_and_fakes_for_its_edges() -> None:
    """Edges of every shape accept objects, and fields that a container fills in are empty by default."""
    page = fake(Page)
    loop = build(Loop, pages=[page], store=fake(Store), named={"home": page})
    assert loop.pages == [page] and loop.named == {"home": page}
    assert dict(loop.counted) == {} and loop.recipe.text == "format = 1\n"
    assert dict(build(Loop, pages=[], store=fake(Store), counted={"a": page}).counted) == {"a": page}


def test_constraints_with_neighbours_are_not_checked() -> None:
    """Constraints between a component and its edges are not checked, because objects have no settings."""
    assert build(Loop, pages=[], store=fake(Store), workers=99).workers == 99


def test_build_does_not_open_the_component(tmp_path: Path) -> None:
    """A built component is not opened."""
    assert build("stores.disk", folder=tmp_path, **SHOP).journal == []
