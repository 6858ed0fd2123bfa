"""Texts beside the pointer."""

import pytest

from drawloom.graph.lsp.hover import describe_token
from drawloom.graph.lsp.workspace import Workspace
from support.editor import Point, Write


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("[page]\nti|tle = 'x'\n", ['[page] title = "x"  (string; mine.toml:3:1)', "title of the page", '  "Shop"  ']),
        ("[store]\nsi|ze = 3\n", ["(integer; mine.toml:3:1)", "how many values it keeps", "  10  default"]),
        ("[store]\nsi|ze = 'x'\n", ["[store] size  (integer; invalid; mine.toml:3:1)", '  "x"  mine.toml:3:1']),
        ("[pa|ge]\n", ["[page] pages.plain, ", "Page with the content of a store.", "used by", "[trainer] pages"]),
        ("[st|ore]\nsize = 'x'\n", ["[store] stores.memory", "size  (integer; invalid; mine.toml:3:1)"]),
        ('[trainer]\npa|ges = ["@page"]\n', ["pages -> [page]  (any number of Page; mine.toml:3:1)"]),
        ('[trainer]\npages = ["@pa|ge"]\n', ["[trainer] pages -> any number of Page\n\n[page] pages.plain, "]),
        ('[store]\nuse = "stores.me|mory"\n', ["stores.memory: Keeps values", "size: integer = 10  (how many values"]),
        ('[store]\nuse = "stores.memry|"\n', ["no component is called 'stores.memry'; did you mean 'stores.memory'?"]),
        ('[page]\ntitle = "$vars.ti|tle"\n', ['$vars.title = "Shop"  ']),
        ("[vars]\nti|tle = 'A'\n", ['$vars.title = "A"  mine.toml:3:1\n$vars.title = "Shop"  ']),
    ],
)
def test_hover_explains_the_token(workspace: Workspace, point: Point, text: str, lines: list[str]) -> None:
    """A hover has type, documentation, default and origin of values, nodes, edges, components and variables."""
    shown = describe_token(workspace, point(f'extends = "small"\n{text}'))
    assert all(line in shown for line in lines), shown


def test_hover_explains_groups_and_overlays(workspace: Workspace, point: Point) -> None:
    """A group lists its members, and an overlay's node has the documentation of its usual component."""
    group = 'extends = "small"\n[a.x]\nuse = "pages.plain"\ntitle = ""\n[trainer]\npages = ["@a|.*"]\n'
    assert describe_token(workspace, point(group)).endswith("[a.x] pages.plain: Page with the content of a store.")
    assert (
        describe_token(workspace, point("[page]\nti|tle = 'x'\n"))
        == "[page] title: string, required  (title of the page)"
    )
    assert "Page with the content of a store." in describe_token(workspace, point("[pa|ge]\ntitle = 'x'\n"))
    assert describe_token(workspace, point("[pa|ges]\ntitle = 'x'\n")) == ""


def test_half_typed_text_is_explained_by_the_last_analysis(workspace: Workspace, write: Write, point: Point) -> None:
    """A line that is not TOML leaves the help for other lines intact."""
    point('extends = "small"\n|[page]\ntitle = "A"\n')
    meaning = point('extends = "small"\n[page]\ncoun\nti|tle = "A"\n')
    assert describe_token(workspace, meaning).startswith('[page] title = "A"  (string; mine.toml:3:1)')
