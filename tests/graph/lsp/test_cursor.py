"""Cursors at positions of a text."""

from pathlib import Path

import pytest

from drawloom.graph.lsp.cursor import Cursor

RECIPE = """# A recipe [with] "quotes"
extends = "small"

[trainer] # what runs
workers = 12
pages = [
    "@page",
    { use = "pages.plain", title = 'a "title"' }, # @page
]

[edit.trainer.pages]
after."@page" = "@other"

[[shelf]]
size = 0.5
"""


def cursor_at(text: str) -> Cursor | None:
    """Return the cursor at the bar."""
    before, after = text.split("|")
    return Cursor.at(before + after, len(before))


@pytest.mark.parametrize(
    ("where", "kind", "path", "written"),
    [
        ("ext|ends", "key", ("extends",), "extends"),
        ('"sm|all"', "value", ("extends",), "small"),
        ("[trainer|]", "header", ("trainer",), "trainer"),
        ("|workers", "key", ("trainer", "workers"), "workers"),
        ("1|2", "value", ("trainer", "workers"), "12"),
        ('    "@page|"', "value", ("trainer", "pages", 0), "@page"),
        ("{ us|e", "key", ("trainer", "pages", 1, "use"), "use"),
        ('"pages.|plain"', "value", ("trainer", "pages", 1, "use"), "pages.plain"),
        ("""'a "ti|tle"'""", "value", ("trainer", "pages", 1, "title"), 'a "title"'),
        ("[ed|it.", "header", ("edit",), "edit"),
        ("edit.tr|ainer.", "header", ("edit", "trainer"), "trainer"),
        ('after."@pa|ge"', "key", ("edit", "trainer", "pages", "after", "@page"), "@page"),
        ('"@oth|er"', "value", ("edit", "trainer", "pages", "after", "@page"), "@other"),
        ("[[sh|elf", "header", ("shelf",), "shelf"),
        ("0.|5", "value", ("shelf", 0, "size"), "0.5"),
        ("what| runs", None, (), ""),
        ('[with] "quo|tes"', None, (), ""),
        ("workers =| 12", None, (), ""),
    ],
)
def test_a_position_in_a_recipe_has_kind_path_and_text(
    where: str, kind: str | None, path: tuple[str | int, ...], written: str
) -> None:
    """Keys, values and parts of headers have their paths; comments and signs have none."""
    before, after = where.split("|")
    assert RECIPE.count(before + after) == 1
    cursor = cursor_at(RECIPE.replace(before + after, where))
    if kind is None:
        assert cursor is None or not cursor.written
    else:
        assert cursor is not None
        assert (cursor.kind, cursor.path, cursor.written) == (kind, path, written)


@pytest.mark.parametrize(
    ("text", "kind", "path", "written"),
    [
        ("|", "key", ("",), ""),
        ("[|", "header", ("",), ""),
        ("[a.|", "header", ("a", ""), ""),
        ("[a]\nx = |", "value", ("a", "x"), ""),
        ("[a]\nx = |\n[b]\ny = [1\n", "value", ("a", "x"), ""),
        ('[a]\nx = ["@b", "@|', "value", ("a", "x", 1), "@"),
        ("[a]\nx = { y = 1, |", "key", ("a", "x", ""), ""),
        ('[a]\nx = "$vars.|"\n', "value", ("a", "x"), "$vars."),
        ("[a]\nx\ny = 1\ny = 2\nz = tr|", "value", ("a", "z"), "tr"),  # lines above need not be TOML
        ('[a]\nx = "open\nz|', "key", ("a", "z"), "z"),
        ('x = "a" |', None, (), ""),
        ('x = """\n a|', None, (), ""),
    ],
)
def test_a_position_in_half_typed_text_has_kind_path_and_text(
    text: str, kind: str | None, path: tuple[str | int, ...], written: str
) -> None:
    """The cursor needs neither the text behind the position, nor valid TOML in the lines above."""
    cursor = cursor_at(text)
    assert (cursor and (cursor.kind, cursor.path, cursor.written)) == (kind and (kind, path, written))


def test_the_token_at_every_position_of_a_shipped_recipe_is_in_its_range() -> None:
    """A cursor's text is in the range of its key or value, in a recipe with all kinds of tables."""
    text = (Path(__file__).parents[3] / "recipes" / "start" / "pretrain.toml").read_text("utf-8")
    cursors = {Cursor.at(text, offset) for offset in range(0, len(text), 7)} - {None}
    assert len(cursors) > 200
    for cursor in cursors:
        assert cursor and cursor.written in text[cursor.start : cursor.end]
