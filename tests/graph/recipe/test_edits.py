"""Edits of lists."""

from pathlib import Path

import pytest

from drawloom.graph.project import Project
from drawloom.graph.recipe.layers import Leaf, Table, locate
from drawloom.graph.recipe.merged import MergedRecipe

BASE = '[a]\nuse = "x.y"\nlist = ["@one", "@two", "@three"]\nnumbers = [1, 2.0, true]'


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a recipe that has lists."""
    monkeypatch.chdir(tmp_path)
    Path("base.toml").write_text(BASE, "utf-8")
    return tmp_path


def load(text: str, *words: str) -> MergedRecipe:
    """The recipe of a text that extends the base, and of overrides."""
    Path("top.toml").write_text(f'extends = "base.toml"\n{text}', "utf-8")
    return Project.of("support.shop").load("top.toml", words=words)


def edited(text: str, *words: str, key: str = "list") -> list[object]:
    """The list after the edits, of which none has a problem."""
    recipe = load(text, *words)
    assert recipe.problems == []
    return list(leaf(recipe, key).value)


def leaf(recipe: MergedRecipe, key: str = "list") -> Leaf:
    """A list with its history."""
    found = recipe.nodes["a"].items[key]
    assert isinstance(found, Leaf)
    return found


@pytest.mark.parametrize(
    ("edit", "result"),
    [
        ('remove = "@two"', "one three"),
        ('remove = ["@three", "@one"]', "two"),
        ('remove = ["@one", "@two", "@three"]', ""),
        ('before."@one" = "@new"', "new one two three"),
        ('after."@one" = ["@new", "@more"]', "one new more two three"),
        ('before."@two" = "@x"\nafter."@one" = "@y"', "one y x two three"),
        ('remove = "@two"\nafter."@two" = "@new"', "one new three"),
        ('remove = "@one"\nafter."@three" = "@one"', "two three one"),
        ("", "one two three"),
    ],
)
def test_elements_are_removed_and_inserted_at_their_anchors(edit: str, result: str) -> None:
    """An edit refers to the list as it was, so that removing an anchor and inserting at it replaces the anchor."""
    assert edited(f"[edit.a.list]\n{edit}") == [f"@{name}" for name in result.split()]


@pytest.mark.parametrize(
    ("edit", "result"),
    [
        ("remove = 1", [2.0, True]),
        ("remove = true", [1, 2.0]),
        ("remove = 2.0", [1, True]),
        ('after."2.0" = 3', [1, 2.0, 3, True]),
    ],
)
def test_elements_that_equal_one_another_only_in_python_are_distinct(edit: str, result: list[object]) -> None:
    """1, 1.0 and true are different elements; an anchor that is no string is named by its TOML text."""
    assert edited(f"[edit.a.numbers]\n{edit}", key="numbers") == result
    assert load("[edit.a.numbers]\nremove = 2").problems[0].code == "DL119"


def test_an_edit_applies_to_lists_from_lower_layers_and_its_own_layer() -> None:
    """Layers merge in order: an edit sees earlier edits and its own layer's list, and a later list discards it."""
    assert edited('[edit.a.list]\nremove = "@one"', "edit.a.list.remove=@two") == ["@three"]
    assert edited('[a]\nlist = ["@x", "@y"]\n[edit.a.list]\nremove = "@x"') == ["@y"]
    assert edited('[edit.a.list]\nremove = "@one"', 'a.list=["@z"]') == ["@z"]


@pytest.mark.parametrize(
    "words",
    [
        ["edit.a.list.after.@two=@new", "edit.a.list.remove=@one"],
        ['edit.a.list={ after = { "@two" = "@new" }, remove = ["@one"] }'],
        ["--edit.a.list.after.@two", "@new", "--edit.a.list.remove=@one"],
    ],
)
def test_lists_are_edited_on_the_command_line(words: list[str]) -> None:
    """An edit is written on the command line by the same keys as in a file."""
    from drawloom.graph.cli.main import split_words

    assert edited("", *split_words(words)[1]) == ["@two", "@new", "@three"]


def test_the_anchor_of_a_group_or_its_member_keeps_its_dots_on_the_command_line() -> None:
    """From the "@" on, a key of the command line is the name of one node."""
    text = '[a]\nlist = ["@g.one", "@g.*"]'
    words = ["edit.a.list.after.@g.one=@x", "edit.a.list.before.@g.*=@y"]
    assert edited(text, *words) == ["@g.one", "@x", "@y", "@g.*"]


def test_every_element_keeps_the_position_where_it_is_written() -> None:
    """A problem with an element leads to the file and line of that element, also after several edits."""
    recipe = load('[edit.a.list]\nbefore."@one" = ["@new"]', "edit.a.list.after.@new=@last")
    table = recipe.nodes["a"]
    assert isinstance(table, Table)
    places = [str(locate(table, ("list", number))) for number in range(5)]
    assert places == ["top.toml:3:18", "command line", "base.toml:3:9", "base.toml:3:17", "base.toml:3:25"]
    assert leaf(recipe).label == "base.toml:3:1 and top.toml:2:9 and command line"


def test_an_edit_with_a_problem_leaves_the_list_as_it_was() -> None:
    """The list is not edited by halves, so that no further problems follow from the first."""
    recipe = load('[edit.a.list]\nremove = ["@one", "@missing"]')
    assert [problem.code for problem in recipe.problems] == ["DL119"]
    assert leaf(recipe).value == ["@one", "@two", "@three"]


def test_a_node_that_may_be_called_like_an_operation_is_edited() -> None:
    """Keys are operations only where the recipe has a list."""
    text = '[remove]\nuse = "x.y"\nafter = ["@one"]\n[edit.remove.after]\nremove = "@one"'
    assert load(text).problems == []
