"""References to nodes and variables, and renames."""

from pathlib import Path

import pytest

from drawloom.graph.lsp.cursor import Cursor
from drawloom.graph.lsp.references import References, Symbol, find_rename_ranges, find_symbol, find_symbol_ranges
from drawloom.graph.lsp.workspace import Meaning, Workspace
from drawloom.graph.problems import UserError
from support.editor import Point, Write

BASE = """
extends = "small" # page2 in a comment
[page2]
use = "pages.plain"
title = "page2"
[trainer]
pages = ["@page", "@page2"]
"""
ON_TOP = """
extends = "base.toml"
unset = ["page2.fallback"]
page2.title = "page2"
[edit.trainer.pages]
remove = "@page2"
after."@page2" = ["@page2", "@@page2"]
[page2.x]
[edit.page2.filters]
[other-page2]
use = "pages.plain"
fallback = "@page2"
"""
APART = 'extends = "small"\n[page2]\nuse = "pages.plain"\ntitle = "another"\n'


@pytest.fixture
def shelf(workspace: Workspace) -> Workspace:
    """Write a base, two recipes on top without the node in the last, and a separate recipe."""
    texts = {
        "base": BASE,
        "top": ON_TOP,
        "last": 'extends = "top.toml"\n[new]\nuse = "stores.memory"\n',
        "apart": APART,
    }
    for name, text in texts.items():
        Path(f"{name}.toml").write_text(text, "utf-8")
    return workspace


def lines_by_file(workspace: Workspace, references: References) -> dict[str, list[int]]:
    """Return the lines, from 1, of all references by file name."""
    return {
        path.name: [workspace.text(path).count("\n", 0, at.start) + 1 for at in ranges]
        for path, ranges in references.files.items()
    }


def test_references_cover_recipes_that_are_merged(shelf: Workspace) -> None:
    """References cover headers, keys, edits and `unset` of merged recipes, not comments, titles or longer names."""
    here = shelf.folders[0]
    expected = {"base.toml": [3, 7], "top.toml": [3, 4, 6, 7, 7, 8, 9, 12]}
    for name in ("base", "top"):
        assert lines_by_file(shelf, References.find(shelf, here / f"{name}.toml", ("page2",))) == expected
    assert lines_by_file(shelf, References.find(shelf, here / "apart.toml", ("page2",))) == {"apart.toml": [2]}
    shipped = lines_by_file(shelf, References.find(shelf, here / "base.toml", ("page",)))
    assert shipped.keys() == {"small.toml", "base.toml"}


@pytest.mark.parametrize(
    ("text", "symbol"),
    [
        ("[pa|ge]\n", ("page",)),
        ("[page]\nti|tle = 'x'\n", None),
        ("[g.x]\nuse = 'stores.memory'\n[page]\nstore = '@g|.x'\n", ("g",)),
        ("[g.x]\nuse = 'stores.memory'\n[page]\nstore = '@g.|x'\n", ("g", "x")),
        ("[g|.x]\nuse = 'stores.memory'\n", ("g",)),
        ("[page]\ntitle = '$vars.ti|tle'\n", ("vars", "title")),
        ("[vars]\nti|tle = 'x'\n", ("vars", "title")),
        ("[page]\nstore = '@nowhe|re'\n", None),
        ("[page]\ntitle = 'pa|ge'\n", None),
    ],
)
def test_only_nodes_and_variables_can_be_renamed(point: Point, text: str, symbol: Symbol | None) -> None:
    """A rename covers existing nodes, groups and variables, and only the part of a dotted name at the position."""
    whole = f'extends = "small"\n{text}'
    assert find_symbol(point(whole), whole.index("|")) == symbol


def test_a_rename_keeps_recipes_valid(shelf: Workspace) -> None:
    """After a rename, the recipes have as many problems as before, and the new node."""
    paths = [shelf.folders[0] / f"{name}.toml" for name in ("base", "top", "last")]
    before = [[str(problem) for problem in shelf.analyse_and_list_problems(path)] for path in paths]
    renames = find_rename_ranges(shelf, paths[1], ("page2",), "kiosk")
    for path, ranges in renames.items():
        text = shelf.text(path)
        for at in reversed(ranges):
            text = text[: at.start] + "kiosk" + text[at.end :]
        shelf.texts[path] = text
    assert shelf.text(paths[0]) == BASE.replace("[page2]", "[kiosk]").replace("@page2", "@kiosk")
    assert [*find_symbol_ranges(shelf.text(paths[1]), ("page2",))] == []
    after = [[str(problem) for problem in shelf.analyse_and_list_problems(path)] for path in paths]
    assert [len(problems) for problems in after] == [len(problems) for problems in before]
    assert "kiosk" in shelf.analyses[paths[2]].graph.nodes


@pytest.mark.parametrize(
    ("symbol", "new", "reason"),
    [
        (("page2",), "new", r"last.toml already has 'new'"),
        (("page2",), "store", r"already has 'store'"),
        (("page2",), "2", "can't be the name of a node"),
        (("page2",), "a.b", "can't be the name of a node"),
        (("page2",), "vars", "can't be the name of a node"),
        (("page",), "home", r"small.toml also names it, and is outside the workspace"),
        (("trainer",), "runner", "a run starts from the node with this name"),
    ],
)
def test_names_that_would_break_a_recipe_are_refused(shelf: Workspace, symbol: Symbol, new: str, reason: str) -> None:
    """A rename refuses taken and invalid names, and nodes of shipped recipes."""
    with pytest.raises(UserError, match=reason):
        find_rename_ranges(shelf, shelf.folders[0] / "base.toml", symbol, new)


def test_an_unreadable_recipe_prevents_a_rename(shelf: Workspace, write: Write) -> None:
    """Nothing is renamed if a recipe is unreadable, and files of other folders are not touched."""
    write("broken.toml", 'extends = "base.toml"\n[page2]\nx =\n')
    with pytest.raises(UserError, match=r"broken.toml can't be read"):
        find_rename_ranges(shelf, shelf.folders[0] / "base.toml", ("page2",), "kiosk")
    here = shelf.folders[0]
    assert shelf.may_rename_in(here / "sub" / "a.toml") and not shelf.may_rename_in(here / ".venv" / "a.toml")
    assert not shelf.may_rename_in(here.parent / "a.toml")


def test_a_variable_is_renamed_in_definition_and_uses(workspace: Workspace, write: Write) -> None:
    """A variable is renamed in its definition and in all uses."""
    text = '[vars]\nn = 1\nm = 2\n[s]\nuse = "stores.memory"\nsize = "$vars.n"\nname = "n"\n'
    path = write("mine.toml", text)
    workspace.analyse_and_list_problems(path)
    cursor = Cursor.at(text, text.index("n ="))
    assert cursor and find_symbol(
        Meaning.from_cursor(workspace, workspace.get_last_analysis_or_empty(path), cursor), cursor.start
    ) == (
        "vars",
        "n",
    )
    assert [
        text.count("\n", 0, at.start) + 1 for at in find_rename_ranges(workspace, path, ("vars", "n"), "k")[path]
    ] == [2, 6]
    with pytest.raises(UserError, match=r"already has 'vars.m'"):
        find_rename_ranges(workspace, path, ("vars", "n"), "m")
