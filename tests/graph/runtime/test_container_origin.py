"""Origins of exceptions."""

from pathlib import Path
from typing import Any

import pytest

from drawloom.graph.problems import UserError
from drawloom.graph.project import Project, Recipe
from support.shop.components.pages.plain import Plain
from support.shop.components.stores.memory import Memory

RECIPE = """extends = "small"

[store]
size = 3

[page]
title = "Kiosk"
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a recipe in the current directory, and let pages read from their store when they open."""
    monkeypatch.chdir(tmp_path)
    Path("kiosk.toml").write_text(RECIPE, "utf-8")
    monkeypatch.setattr(Plain, "open", lambda page: page.store.get("home"), raising=False)


def _make_get_fail(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def get(self: Memory, key: str) -> Any:
        raise error

    monkeypatch.setattr(Memory, "get", get)


@pytest.mark.parametrize(
    ("message", "words", "printed"),
    [
        ("size: nothing fits", [], "kiosk.toml:4:8: [store] size: nothing fits"),
        ("nothing fits; increase `size`", [], "kiosk.toml:4:8: [store] nothing fits; increase `size`"),
        ("size: nothing fits", ["store.size=2"], "command line: [store] size: nothing fits"),
        ("sizes: nothing fits", [], "[store] sizes: nothing fits"),
    ],
)
def test_an_error_is_placed_where_the_wrong_value_is_written(
    project: Project, monkeypatch: pytest.MonkeyPatch, message: str, words: list[str], printed: str
) -> None:
    """An error names the raising node and the position of the setting, unless a shipped recipe has it."""
    _make_get_fail(monkeypatch, UserError(message))
    with pytest.raises(UserError) as caught, Recipe.load("kiosk.toml", *words, project=project).open():
        pass
    assert str(caught.value) == printed


def test_a_bug_in_a_component_names_its_node(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug has a note with the node that raised it, and an exception outside of nodes has none."""
    recipe = Recipe.load("kiosk.toml", project=project)
    with pytest.raises(ZeroDivisionError) as outside, recipe.open(only="store"):
        _ = 1 / 0
    assert not hasattr(outside.value, "__notes__")
    _make_get_fail(monkeypatch, RuntimeError("a bug"))
    with pytest.raises(RuntimeError) as caught, recipe.open():
        pass
    (note,) = caught.value.__notes__
    assert note.startswith("in [store] (stores.memory), ") and note.endswith("small.toml:7:7")
