"""Edits of lists in recipes."""

from pathlib import Path

import pytest

from drawloom.graph.project import Project
from drawloom.graph.recipe.layers import Leaf, Table, locate_part
from drawloom.graph.recipe.merged import MergedRecipe

BASE = '[a]\nuse = "x.y"\nlist = ["@one", "@two", "@three"]\nnumbers = [1, 2.0, true]'


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current directory, with a recipe that has lists."""
    monkeypatch.chdir(tmp_path)
    Path("base.toml").write_text(BASE, "utf-8")
    return tmp_path


def load(text: str, *words: str) -> MergedRecipe:
    """Load a text that extends the base, with overrides."""
    Path("top.toml").write_text(f'extends = "base.toml"\n{text}', "utf-8")
    return Project.from_package("support.shop").load("top.toml", overrides=words)


def edit_list(text: str, *words: str, key: str = "list") -> list[object]:
    """Return the list after edits without problems."""
    recipe = load(text, *words)
    assert recipe.problems == []
    return list(leaf(recipe, key).value)


def leaf(recipe: MergedRecipe, key: str = "list") -> Leaf:
    """Return a list with its history."""
    item = recipe.nodes["a"].items[key]
    assert isinstance(item, Leaf)
    return item


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
    """Edits refer to the list before them, so an anchor is replaced by removing it and inserting at it."""
    assert edit_list(f"[edit.a.list]\n{edit}") == [f"@{name}" for name in result.split()]


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
    """1, 1.0 and true are different elements, and anchors other than strings are named by their TOML text."""
    assert edit_list(f"[edit.a.numbers]\n{edit}", key="numbers") == result
    assert load("[edit.a.numbers]\nremove = 2").problems[0].code == "DL119"


def test_an_edit_applies_to_lists_from_lower_layers_and_its_own_layer() -> None:
    """Layers merge in order: an edit sees earlier edits and its own layer's list, and a later list discards it."""
    assert edit_list('[edit.a.list]\nremove = "@one"', "edit.a.list.remove=@two") == ["@three"]
    assert edit_list('[a]\nlist = ["@x", "@y"]\n[edit.a.list]\nremove = "@x"') == ["@y"]
    assert edit_list('[edit.a.list]\nremove = "@one"', 'a.list=["@z"]') == ["@z"]


@pytest.mark.parametrize(
    "words",
    [
        ["edit.a.list.after.@two=@new", "edit.a.list.remove=@one"],
        ['edit.a.list={ after = { "@two" = "@new" }, remove = ["@one"] }'],
        ["--edit.a.list.after.@two", "@new", "--edit.a.list.remove=@one"],
    ],
)
def test_lists_are_edited_on_the_command_line(words: list[str]) -> None:
    """Edits on the command line use the keys of a file."""
    from drawloom.graph.cli.main import split_off_overrides

    assert edit_list("", *split_off_overrides(words)[1]) == ["@two", "@new", "@three"]


def test_the_anchor_of_a_group_or_its_member_keeps_its_dots_on_the_command_line() -> None:
    """On the command line, a key after "@" is one node name, with its dots."""
    text = '[a]\nlist = ["@g.one", "@g.*"]'
    words = ["edit.a.list.after.@g.one=@x", "edit.a.list.before.@g.*=@y"]
    assert edit_list(text, *words) == ["@g.one", "@x", "@y", "@g.*"]


def test_every_element_keeps_the_position_where_it_is_written() -> None:
    """Every element of an edited list has the file and line where it is written."""
    recipe = load('[edit.a.list]\nbefore."@one" = ["@new"]', "edit.a.list.after.@new=@last")
    table = recipe.nodes["a"]
    assert isinstance(table, Table)
    positions = [str(locate_part(table, ("list", number))) for number in range(5)]
    assert positions == ["top.toml:3:18", "command line", "base.toml:3:9", "base.toml:3:17", "base.toml:3:25"]
    assert leaf(recipe).position_label == "base.toml:3:1 and top.toml:2:9 and command line"


def test_an_edit_with_a_problem_leaves_the_list_as_it_was() -> None:
    """A list with a faulty edit is not edited at all, so that no further problems follow."""
    recipe = load('[edit.a.list]\nremove = ["@one", "@missing"]')
    assert [problem.code for problem in recipe.problems] == ["DL119"]
    assert leaf(recipe).value == ["@one", "@two", "@three"]


def test_a_node_that_may_be_called_like_an_operation_is_edited() -> None:
    """A node called `remove` with a list called `after` is edited like others."""
    text = '[remove]\nuse = "x.y"\nafter = ["@one"]\n[edit.remove.after]\nremove = "@one"'
    assert load(text).problems == []
