"""What a position of a text is."""

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


def at(text: str) -> Cursor | None:
    """The cursor where the bar is."""
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
def test_a_position_in_a_recipe(where: str, kind: str | None, path: tuple[str | int, ...], written: str) -> None:
    """Keys, values and parts of headers have their paths; comments and signs have none."""
    before, after = where.split("|")
    assert RECIPE.count(before + after) == 1
    found = at(RECIPE.replace(before + after, where))
    if kind is None:
        assert found is None or not found.written
    else:
        assert found is not None
        assert (found.kind, found.path, found.written) == (kind, path, written)


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
        ("[a]\nx\ny = 1\ny = 2\nz = tr|", "value", ("a", "z"), "tr"),  # what is above may not be TOML either
        ('[a]\nx = "open\nz|', "key", ("a", "z"), "z"),
        ('x = "a" |', None, (), ""),
        ('x = """\n a|', None, (), ""),
    ],
)
def test_a_position_in_half_typed_text(text: str, kind: str | None, path: tuple[str | int, ...], written: str) -> None:
    """The cursor needs neither the text behind the position, nor valid TOML in the lines above."""
    found = at(text)
    assert (found and (found.kind, found.path, found.written)) == (kind and (kind, path, written))


def test_every_position_of_every_shipped_recipe_is_read() -> None:
    """Each key and value is found again at its own range, in a text of all kinds of tables."""
    text = (Path(__file__).parents[3] / "recipes" / "pretrain.toml").read_text("utf-8")
    found = {Cursor.at(text, offset) for offset in range(0, len(text), 7)} - {None}
    assert len(found) > 200
    for cursor in found:
        assert cursor and cursor.written in text[cursor.start : cursor.end]
