"""The output of `explain`."""

from collections.abc import Callable
from pathlib import Path

import pytest

from drawloom.graph.inspect.explain import explain, format_ordinal
from drawloom.graph.problems import UserError
from drawloom.graph.project import Project

Explain = Callable[[str], list[str]]

TOP = """
extends = "small"

[vars]
title = "Kiosk"

[page]
filters = ["@cut", { use = "pages.translate" }, "@find"]

[cut]
use = "pages.parse"

[find]
use = "pages.look_up"

[room]
use = "stores.varied"
shelves = [{ width = 3 }, { width = 4 }]
table = { a = 1.5 }
"""

OVER = "[room]\ntable = { b = 2.5 }\nwhole = 7"


@pytest.fixture
def explain_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, project: Project) -> Explain:
    """Return a function that explains a target, line by line."""
    monkeypatch.chdir(tmp_path)
    Path("top.toml").write_text(TOP, "utf-8")
    Path("over.toml").write_text(OVER, "utf-8")
    graph = project.graph(project.load("top.toml", ["over.toml"], ["room.whole=8", "page.store=@store"]))
    small = str(next(layer.source for layer in graph.recipe.layers))

    def explain_target(target: str) -> list[str]:
        return explain(graph, target, "trainer").replace(small, "SMALL").splitlines()

    return explain_target


def test_a_key_lists_every_layer_that_set_it(explain_lines: Explain) -> None:
    """A key lists its values with their positions, newest first: command line, overlays, recipe, default."""
    assert explain_lines("room.whole") == [
        "[room] whole = 8  (integer; command line)",
        "  an integer",
        "  impact of another value on a resumed run: changes_training",
        "  8  command line",
        "  7  over.toml:3:1",
        "  1  default",
    ]


def test_an_edited_list_shows_removed_and_inserted_elements(explain_lines: Explain, project: Project) -> None:
    """An edited list is followed by its edits with their positions and by the list before them."""
    Path("edit.toml").write_text(
        '[edit.page.filters]\nremove = "@cut"\nbefore."@find" = "@who"\n[who]\nuse = "pages.parse"'
    )
    graph = project.graph(project.load("top.toml", ["edit.toml"]))
    lines = explain(graph, "page.filters", "trainer").splitlines()
    assert lines[0].endswith("top.toml:8:1 and edit.toml:1:12)")
    assert lines[1:] == [
        '  [{ use = "pages.translate" }, "@who", "@find"]  edit.toml:1:12',
        '    removed "@cut"',
        '    inserted "@who"  edit.toml:3:18',
        '  ["@cut", { use = "pages.translate" }, "@find"]  top.toml:8:1',
    ]
    assert explain(graph, "page.filters[2]", "trainer").splitlines()[1:] == ['  filters: "@find"  top.toml:8:49']


def test_a_variable_lists_the_layers_that_set_it(explain_lines: Explain) -> None:
    """A value of a variable is followed by the layers that set the variable."""
    assert explain_lines("page.title")[3:] == [
        '  "$vars.title"  SMALL:11:1',
        '    "Kiosk"  top.toml:5:1',
        '    "Shop"  SMALL:4:1',
    ]


def test_a_part_of_a_value_is_explained(explain_lines: Explain) -> None:
    """Items of arrays and tables have their own positions."""
    assert explain_lines("room.shelves[1].width")[-1] == "  shelves: 4  top.toml:18:37"
    assert explain_lines("room.table")[-3:] == [
        "  1.5  top.toml:19:11",
        "  2.5  over.toml:2:11",
        "  {}  default",
    ]
    assert explain_lines("room.table.b")[-1] == "  2.5  over.toml:2:11"


def test_a_node_lists_settings_edges_users_and_order(explain_lines: Explain) -> None:
    """A node lists its component, settings and edges with their origins, its users and its build order."""
    assert explain_lines("page") == [
        "[page] pages.plain, SMALL:10:7",
        "  Page with the content of a store.",
        "  implements Page, Counted",
        "  settings",
        '    title = "Kiosk"  (string; small.toml:11:1 $vars.title top.toml:5:1)',
        "  edges",
        "    store -> [store]  (Store; command line)",
        "    fallback -> none  (Page, or none; default)",
        "    filters -> [cut], [page.filters[1]], [find]  (a sequence of Filter; top.toml:8:1)",
        "  used by",
        "    [trainer] pages",
        "  order",
        "    built 5th of 6, after [store], [cut], [page.filters[1]], [find]",
    ]


def test_a_member_of_a_sequence_lists_its_dataflow(explain_lines: Explain) -> None:
    """A member lists the values that it reads, changes or writes, with their writers and readers."""
    assert explain_lines("page.filters[1]")[-4:] == [
        "  order",
        "    built 3rd of 6",
        "    2nd of 3 in [page] filters",
        "      changes words, written by [cut]",
    ]
    assert explain_lines("cut")[-1] == "      writes words, consumed by [page.filters[1]] and [find]"


def test_filled_fields_and_unbuilt_nodes_are_explained(explain_lines: Explain) -> None:
    """A field of type Every lists its nodes, and a node without users is marked as not built."""
    assert "    counted: every Counted: [page]" in explain_lines("trainer")
    assert explain_lines("trainer.counted") == ["[trainer] counted is filled by the container"]
    assert explain_lines("room")[-1] == "    not built: no node that [trainer] needs refers to it"


def test_without_a_target_the_layers_and_nodes_are_listed(explain_lines: Explain) -> None:
    """Without a target, layers are listed from the lowest up, and nodes with their component docs."""
    lines = explain_lines("")
    assert lines[0] == "SMALL, then top.toml, then over.toml, then command line"
    assert "[cut] pages.parse: Strips a request." in lines


@pytest.mark.parametrize("target", ["pag", "page.titel", "page.title.deep[", "vars.title"])
def test_an_unknown_target_is_a_user_error(explain_lines: Explain, target: str) -> None:
    """An unknown target is a user error, and a malformed path is explained as far as it is known."""
    if target.startswith("page.title."):
        assert explain_lines(target)
        return
    with pytest.raises(UserError, match="there is no") as caught:
        explain_lines(target)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (1, "1st"),
        (2, "2nd"),
        (3, "3rd"),
        (4, "4th"),
        (11, "11th"),
        (12, "12th"),
        (13, "13th"),
        (21, "21st"),
        (112, "112th"),
    ],
)
def test_ordinals_have_english_endings(number: int, text: str) -> None:
    """Ordinals end in st, nd, rd or th, and 11, 12 and 13 in th."""
    assert format_ordinal(number) == text
