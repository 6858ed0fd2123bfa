"""Answers to an editor for any text."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from drawloom.graph.lsp.completion import find_replaced_range, list_completions
from drawloom.graph.lsp.cursor import Cursor
from drawloom.graph.lsp.diagnostics import diagnose
from drawloom.graph.lsp.hover import describe_token
from drawloom.graph.lsp.references import find_definitions, find_symbol, find_symbol_ranges
from drawloom.graph.lsp.workspace import Meaning, Workspace
from drawloom.graph.project import Project

RECIPE = """extends = "small"
unset = ["page.fallback"]

[vars]
n = 3

[shelf.a]
use = "stores.memory"
size = "$vars.n"

[shelf.b]
use = "stores.varied"
named = { x = [{ width = 1 }] }

[page]
store = "@shelf.a"
fallback = "@menu"

[menu]
use = "pages.menu"
links = { home = "@page", other = { use = "pages.plain", title = "@@x", store = "@shelf.b" } }
filters = ["@filters.*"]

[edit.trainer.pages]
after."@page" = ["@menu"]
"""
TYPED = ["", "@", '"', "'", "[", "]]", "{", "}", "=", ".", "\n", "use = ", "$vars.", "\\", "[edit.a.b]\n", "\U0001f9f6"]
POSITION = st.integers(0, len(RECIPE))
WORKSPACE = Workspace(Project.from_package("support.shop"))


@given(POSITION, st.integers(0, 9), st.sampled_from(TYPED), st.lists(POSITION, min_size=1, max_size=20))
def test_every_question_is_answered(start: int, removed: int, typed: str, positions: list[int]) -> None:
    """All questions at any position of a damaged recipe are answered, and a symbol's ranges include its own."""
    text, path = RECIPE[:start] + typed + RECIPE[start + removed :], Path("mine.toml").resolve()
    WORKSPACE.texts = {path: text}
    assert all(0 <= mark.start <= mark.end <= len(text) for mark in diagnose(WORKSPACE, path))
    for position in positions:
        cursor = Cursor.at(text, min(position, len(text)))
        if cursor is None:
            continue
        meaning = Meaning.from_cursor(WORKSPACE, WORKSPACE.get_last_analysis_or_empty(path), cursor)
        assert (
            cursor.start
            <= find_replaced_range(meaning, position)[0]
            <= find_replaced_range(meaning, position)[1]
            <= len(text)
        )
        list(list_completions(WORKSPACE, meaning))
        describe_token(WORKSPACE, meaning)
        find_definitions(WORKSPACE, meaning)
        symbol = find_symbol(meaning, position)
        inside = (
            [at for at in find_symbol_ranges(text, symbol) if cursor.start <= at.start <= at.end <= cursor.end]
            if symbol
            else []
        )
        assert len(inside) == (symbol is not None)
