"""Settings that name something."""

from collections.abc import Callable

import pytest

from drawloom.graph.build.graph import Graph

Shop = Callable[..., Graph]

MENU = """
[other]
use = "pages.plain"
title = "Other"
filters = [{{ use = "pages.parse" }}]
[menu]
use = "pages.menu"
links = {{ here = "@page", there = "@other" }}
{}
[trainer]
pages = ["@menu"]
"""


@pytest.mark.parametrize(
    ("line", "text", "hint"),
    [
        ('first = "page"', "", ""),
        ('first = "pag"', "first: no node that is a Page is called 'pag'", "did you mean 'page'?"),
        ('first = "store"', "first: no node that is a Page is called 'store'", "there is menu, other, page"),
        ('show = ["words"]', "", ""),
        ('show = ["words", "wrods"]', "show[1]: no value is called 'wrods'", "did you mean 'words'?"),
        ('hide = ["Oth*"]', "", ""),
        ('hide = ["Oth*", "X?"]', "hide[1]: no title matches 'X?'", "there is Other, Shop"),
        ('hue = ["nobody", "knows"]', "", ""),
        ('entries = [{ page = "page" }]', "", ""),
        (
            'entries = [{ page = "page" }, { text = "x", page = "pages" }]',
            "entries[1].page: no node that is a Page is called 'pages'",
            "did you mean 'page'?",
        ),
    ],
)
def test_names_are_looked_for_among_what_there_is(shop: Shop, line: str, text: str, hint: str) -> None:
    """Nodes that fit a port, values of sequences, and what components offer; deep inside settings, too."""
    faults = shop(MENU.format(line)).faults
    assert [(fault.text, fault.hint, fault.code) for fault in faults] == ([(text, hint, "DL308")] if text else [])
