"""Completions at a position."""

import pytest

from drawloom.graph.lsp.completion import find_replaced_range, list_completions
from drawloom.graph.lsp.workspace import Workspace
from support.editor import Point

MENU = '[menu]\nuse = "pages.menu"\nlinks = {}\n'
EDIT = "[edit.trainer.pages]\n"


@pytest.mark.parametrize(
    ("text", "offered"),
    [
        ("|", ["extends", "unset"]),
        ('extends = "|"\n', ['"small"', '"base.toml"']),
        ('extends = "small"\nunset = ["|"]\n', ['"vars"', '"store"', '"page"', '"trainer"']),
        ('extends = "small"\n[|]\n[page]\n', ["vars", "store", "trainer", "edit"]),
        ('extends = "small"\n[edit.|]\n', ["vars", "store", "page", "trainer"]),
        ('extends = "small"\n[edit.trainer.|]\n', ["pages"]),
        (f'extends = "small"\n{EDIT}|\n', ["remove", "before", "after"]),
        (f'extends = "small"\n{EDIT}remove = "|"\n', ['"@page"']),
        (f'extends = "small"\n{EDIT}remove = ["@page", "@|"]\n', ['"@page"']),
        (f'extends = "small"\n{EDIT}after."@|" = "@store"\n', ['"@page"']),
        ('extends = "small"\n[store]\nsize = 3\n|\n', ["name"]),
        ('extends = "small"\n[page]\n|', ["store", "fallback", "filters", "title"]),
        ('extends = "small"\n[page]\nstore = "@|"\n', ['"@store"']),
        (f'extends = "small"\n{MENU}[trainer]\npages = ["@|"]\n', ['"@page"', '"@menu"']),
        ('extends = "small"\n[a.x]\nuse = "pages.plain"\n[page]\nfallback = "|"\n', ['"@a.x"']),
        ('extends = "small"\n[a.x]\nuse = "pages.plain"\n[trainer]\npages = [|]\n', ['"@page"', '"@a.x"', '"@a.*"']),
        ('extends = "small"\n[page]\ntitle = "$|"\n', ['"$vars.title"']),
        (f"{MENU}entries = [{{ | }}]\n", ["page", "text"]),
        ('[page]\n|title = "an overlay"\n', ["store", "fallback", "filters"]),
        ("[nowhere]\n|", []),
    ],
)
def test_completion_offers_fitting_names(workspace: Workspace, point: Point, text: str, offered: list[str]) -> None:
    """Completion offers nodes with a fitting port, keys not set yet, and elements of an edited list."""
    (workspace.folders[0] / "base.toml").write_text("", "utf-8")
    assert [item.text for item in list_completions(workspace, point(text))] == offered


def test_completion_offers_values_of_finite_types(workspace: Workspace, point: Point) -> None:
    """Completion offers booleans, literals and enum members, or else the default."""
    text = 'extends = "small"\n[v]\nuse = "stores.varied"\n'
    offered = {
        key: [item.text for item in list_completions(workspace, point(f"{text}{key} = |\n")) if item.kind == "value"]
        for key in ("flag", "choice", "colour", "either", "part", "pair", "moment", "anything")
    }
    assert offered == {
        "flag": ["true", "false"],
        "choice": ['"one"', "2", "true"],
        "colour": ['"red"', '"blue"'],
        "either": ['"rest"'],
        "part": ["0.5"],
        "pair": ["[1, 2.0]"],
        "moment": [],
        "anything": [],
    }
    inside = {"shelf = { | }": ["width", "name", "books"], "named = { a = [{ | }] }": ["width", "name", "books"]}
    assert {
        key: [item.text for item in list_completions(workspace, point(f"{text}{key}\n"))] for key in inside
    } == inside


@pytest.mark.parametrize(
    "text",
    [
        '[store]\nuse = "|"\n',
        '[store]\nuse = "stores.disk|"\n',
        '[page]\nstore = { use = "|" }\n',
        '[other]\nuse = "stores.memory"\n[page]\nstore = "@other"\n[trainer]\nstore = { use = "|" }\n',
    ],
)
def test_components_that_fit_come_first(workspace: Workspace, point: Point, text: str) -> None:
    """Completion of `use` offers all components and prefers stores if a store is needed."""
    items = [*list_completions(workspace, point(f'extends = "small"\n{text}'))]
    assert {item.text.strip('"') for item in items} == set(workspace.project.registry.names())
    preferred = {item.text for item in items if item.preferred}
    assert '"stores.memory"' in preferred and not [use for use in preferred if not use.startswith('"stores.')]


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ('pages = ["@pa|ge", "@b"]', '"@pa|ge"'),
        ('pages = ["@pa|, "@b"]', '"@pa|'),
        ("size = |", "|"),
        ("[tra|iner]", "tra|iner"),
    ],
)
def test_completion_replaces_the_token(point: Point, text: str, rest: str) -> None:
    """A completion replaces the token with its quotes, or the text before the cursor if the quotes are open."""
    point('[trainer]\nuse = "servers.loop"\n|')
    whole = f'[trainer]\nuse = "servers.loop"\n{text}'
    offset = whole.index("|")
    meaning = point(whole)
    plain = whole.replace("|", "")
    start, end = find_replaced_range(meaning, offset)
    assert f"{plain[start:offset]}|{plain[offset:end]}" == rest


def test_all_components_are_offered_outside_of_tables(workspace: Workspace, point: Point) -> None:
    """Completion offers all components for a `use` outside of tables."""
    offered = [item.text.strip('"') for item in list_completions(workspace, point("use = |\n"))]
    assert offered == workspace.project.registry.names()
