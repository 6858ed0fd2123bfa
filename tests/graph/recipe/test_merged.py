"""Merged recipes: layers, groups, variables and removed nodes."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from drawloom.graph.problems import RecipeError
from drawloom.graph.project import Project
from drawloom.graph.recipe.merged import MergedRecipe


def write(folder: Path, **texts: str) -> None:
    """Write recipe files."""
    for name, text in texts.items():
        (folder / f"{name}.toml").write_text(text, "utf-8")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(name: str, overlays: Sequence[str] = (), words: Sequence[str] = ()) -> MergedRecipe:
    """Load a recipe of the current directory."""
    return Project.from_package("support.shop").load(name, overlays, words)


def plain(recipe: MergedRecipe, node: str) -> dict[str, object]:
    """Return a node's keys and values."""
    return {key: getattr(item, "value", item) for key, item in recipe.nodes[node].items.items()}


def test_bases_merge_left_to_right_and_overlays_last(here: Path) -> None:
    """Later bases override earlier bases, then follow the file, its overlays and the command line."""
    write(
        here,
        one='[a]\nuse = "x.y"\nk = 1\nl = 1\nm = 1\nn = 1',
        two="[a]\nl = 2\nm = 2\nn = 2",
        over="[a]\nn = 4\no = 4",
    )
    write(here, top='extends = ["one.toml", "two.toml"]\n[a]\nm = 3\nn = 3')
    recipe = load("top.toml", ["over.toml"], ["a.o=5"])
    assert plain(recipe, "a") == {"use": "x.y", "k": 1, "l": 2, "m": 3, "n": 4, "o": 5}


def test_a_changed_use_drops_the_settings_of_the_old_component(here: Path) -> None:
    """A changed `use` drops the settings of lower layers and keeps its own."""
    write(here, base='[a]\nuse = "x.y"\nk = 1\n[b]\nuse = "x.y"\nk = 1')
    write(here, top='extends = "base.toml"\n[a]\nuse = "x.z"\nl = 2\n[b]\nuse = "x.y"\nl = 2')
    recipe = load("top.toml")
    assert plain(recipe, "a") == {"use": "x.z", "l": 2}
    assert plain(recipe, "b") == {"use": "x.y", "k": 1, "l": 2}


def test_groups_keep_the_order_of_the_file_and_lose_unset_members(here: Path) -> None:
    """A group's members are its tables in order without unset members, and a group may become empty."""
    write(here, base='[g.b]\nuse = "x.y"\n[g.a]\nuse = "x.y"')
    write(here, less='extends = "base.toml"\nunset = ["g.b"]', none='extends = "less.toml"\nunset = ["g.a"]')
    assert load("base.toml").groups == {"g": ["g.b", "g.a"]}
    assert load("less.toml").groups == {"g": ["g.a"]}
    assert load("none.toml").groups == {"g": []}


def test_a_leaf_remembers_replaced_values(here: Path) -> None:
    """Every value has the history of values that it replaced, newest first."""
    write(here, base='[a]\nuse = "x.y"\nk = 1', top='extends = "base.toml"\n\n[a]\nk = 2')
    leaf = load("top.toml", [], ["a.k=3"]).nodes["a"].items["k"]
    assert [f"{value.value} {value.key_position}" for value in leaf.history()] == [  # type: ignore[union-attr]
        "3 command line",
        "2 top.toml:4:1",
        "1 base.toml:3:1",
    ]


def test_a_symlink_to_a_base_outside_of_the_recipe_folder_is_refused(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A base outside of both folders is refused, by a symlink or by a path with `..`."""
    own = here / "above" / "own"
    own.mkdir(parents=True)
    write(here, base='[a]\nuse = "x.y"')
    (own / "link.toml").symlink_to(here / "base.toml")
    write(own, top='extends = "link.toml"', far='extends = "../../base.toml"', near='extends = "../base.toml"')
    write(own.parent, base='[a]\nuse = "x.y"')
    monkeypatch.chdir(own)
    for name in ("top.toml", "far.toml"):
        with pytest.raises(RecipeError, match="outside the current directory"):
            load(name)
    assert list(load("near.toml").nodes) == ["a"]


def test_an_unused_variable_similar_to_another_is_an_error(here: Path) -> None:
    """An unused variable similar to a used one is an error, and another unused variable is a warning."""
    write(here, top='[vars]\nlength = 1\nlenght = 2\nspare = 3\n[a]\nuse = "x.y"\nk = "$vars.length"\n')
    problems = {problem.text.split("'")[1]: problem for problem in load("top.toml").problems}
    assert {name: problem.warning for name, problem in problems.items()} == {"$vars.lenght": False, "$vars.spare": True}
    assert problems["$vars.lenght"].hint == "did you mean 'length'?"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\xff\xfe[\x00a\x00]\x00", "not UTF-8"),
        (b"a = " + b"[" * 5000, "TOML|nested"),
        (b"x = 1\n" * 400_000, "larger than 1 MiB"),
        (b"[a]\x00\n", "not TOML"),
        (b"a = " + b"9" * 5000, "digits"),
    ],
)
def test_an_unreadable_recipe_is_one_problem(here: Path, content: bytes, reason: str) -> None:
    """A file that can't be read or is not TOML is one problem with the reason."""
    (here / "bad.toml").write_bytes(content)
    with pytest.raises(RecipeError, match=reason) as caught:
        load("bad.toml")
    assert len(caught.value.problems) == 1


def test_a_byte_order_mark_is_ignored(here: Path) -> None:
    """A file is read equally with and without a byte order mark."""
    (here / "bom.toml").write_bytes(b'\xef\xbb\xbf[a]\nuse = "x.y"\n')
    assert list(load("bom.toml").nodes) == ["a"]


def test_a_shipped_recipe_is_found_by_name(project: Project) -> None:
    """A shipped recipe is found without path or suffix."""
    assert project.graph(project.load("small")).errors == []


def test_values_merged_later_keep_other_problems() -> None:
    """After later values, used variables stay used, and earlier problems are reported once."""
    sizes = {"length": 3, "lengths": 4}
    node = {"use": "x", "of": "$vars.length", "all": "$vars.lengths"}
    recipe = MergedRecipe.from_values({"vars": sizes, "a": node})
    assert recipe.problems == recipe.with_values({"a": {"more": 1}}).with_values({"vars": {"length": 5}}).problems == []
    wrong = MergedRecipe.from_values({"vars": sizes | {"other": 1}, "a": node, "unset": ["nothing"]})
    again = wrong.with_values({"a": {"more": 1}}).with_values({"a": {"more": 2}})
    assert (
        [problem.code for problem in again.problems]
        == [problem.code for problem in wrong.problems]
        == ["DL109", "DL116"]
    )
    assert wrong.with_values({"a": {"more": "$vars.other"}}).problems == wrong.problems[:1]


def test_variables_refer_to_variables() -> None:
    """A later layer's value counts, inside of arrays, too; a circle and a missing variable are named once each."""
    variables = {"a": "$vars.b", "b": "$vars.c", "c": 1, "list": ["$vars.a", {"of": "$vars.c"}], "text": "$$vars.c"}
    recipe = MergedRecipe.from_values({"vars": variables}).with_values({"vars": {"c": 7}})
    values = {name: leaf.value for name, leaf in recipe.vars.items()}
    assert values == {"a": 7, "b": 7, "c": 7, "list": [7, {"of": 7}], "text": "$$vars.c"}
    circle = {"a": ["$vars.b"], "b": "$vars.a", "length": 1, "other": "$vars.lenght"}
    faults = [problem for problem in MergedRecipe.from_values({"vars": circle}).problems if problem.code == "DL307"]
    assert [(fault.text, fault.hint) for fault in faults] == [
        ("vars.a: it refers to itself, $vars.a = $vars.b = $vars.a", "write the value itself in one of them"),
        ("vars.b: it refers to itself, $vars.b = $vars.a = $vars.b", "write the value itself in one of them"),
        ("vars.other: there is no variable '$vars.lenght'", "did you mean 'length'?"),
    ]
