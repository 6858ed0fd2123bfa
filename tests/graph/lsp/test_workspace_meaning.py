"""Meanings of keys and values."""

from collections.abc import Mapping
from typing import Any

import pytest

from support.editor import Point

GROUP = '[shelf.a]\nuse = "stores.memory"\n'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[pa|ge]\n", {"node": "page", "path": ()}),
        ("[page]\nti|tle = 'x'\n", {"node": "page", "path": ("title",), "field": "title"}),
        (f"{GROUP}si|ze = 3\n", {"node": "shelf.a", "path": ("size",), "field": "size"}),
        ("[edit.trainer.pa|ges]\n", {"node": "trainer", "path": ("pages",), "field": "pages"}),
        (
            '[edit.trainer.pages]\nafter."@pa|ge" = []\n',
            {"reference_target": "page", "node": "trainer", "field": "pages"},
        ),
        ('[trainer]\npages = [{ use = "pages.pl|ain" }]\n', {"use": "pages.plain", "node": "trainer.pages[0]"}),
        ('[trainer]\npages = [{ use = "pages.plain", ti|tle = "" }]\n', {"node": "trainer.pages[0]", "field": "title"}),
        ('[trainer]\npages = ["@shelf|.*"]\n', {"reference_target": "shelf", "field": "pages"}),
        ('[page]\ntitle = "@@n|o"\n', {"reference_target": "", "variable": ""}),
        ('[page]\ntitle = "$vars.ti|tle"\n', {"variable": "title"}),
        ("[vars]\nti|tle = 3\n", {"variable": "title", "node": ""}),
        ("[nowhere]\nx|y = 3\n", {"node": "", "path": ("nowhere", "xy"), "field": None}),
    ],
)
def test_a_position_has_a_meaning(point: Point, text: str, expected: Mapping[str, Any]) -> None:
    """A meaning names node, key, reference, variable or component, also in groups, inline nodes and edits."""
    meaning = point(f'extends = "small"\n{text}')
    values = {name: getattr(meaning, name) for name in expected}
    if values.get("field"):
        values["field"] = values["field"].name
    assert values == expected


def test_meaning_names_the_extended_base(point: Point) -> None:
    """A string in `extends`, alone or in an array, means a base."""
    assert (
        point('extends = "sm|all"\n').extended_recipe_name
        == point('extends = ["sm|all"]\n').extended_recipe_name
        == "small"
    )


def test_an_overlay_has_the_usual_components(point: Point) -> None:
    """A node without `use` has the component of the shipped recipes."""
    meaning = point("[page]\nti|tle = 'x'\n")
    assert meaning.analysis.is_overlay and meaning.spec and meaning.spec.use == "pages.plain"
    assert meaning.field and meaning.field.name == "title"
