"""What `draw` prints."""

from collections.abc import Callable

import pytest

from drawloom.graph.build.graph import Graph
from drawloom.graph.cli.main import main
from drawloom.graph.cli.project import Project
from drawloom.graph.drawing.draw import FORMATS, Format, draw
from drawloom.graph.problems import UserError
from support import svg

FILTERS = """
[cut]
use = "pages.parse"
[find]
use = "pages.look_up"
[page]
filters = ["@cut", "@find"]
"""


def test_a_tree_around_a_node_says_who_uses_it(shop: Callable[..., Graph]) -> None:
    """Users first, then what it needs."""
    assert draw(shop(FILTERS), "shop", "trainer", focus="page").splitlines() == [
        "used by [trainer] pages",
        "[page] pages.plain",
        "├── store: [store] stores.memory",
        "├── filters: [cut] pages.parse",
        "└── filters: [find] pages.look_up",
    ]


def test_a_step_as_text_says_what_each_does(shop: Callable[..., Graph]) -> None:
    """Members are numbered, values stand below."""
    assert draw(shop(FILTERS), "shop", "trainer", focus="page", step=True).splitlines() == [
        "shop: [page] filters",
        "  1. [cut] pages.parse",
        "     writes words",
        "  2. [find] pages.look_up",
        "     reads words, user (not written)",
    ]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("step", [False, True])
def test_every_format_names_all_and_ends_with_a_line(shop: Callable[..., Graph], format: Format, step: bool) -> None:
    """Text for programs and people alike."""
    drawn = draw(shop(FILTERS), "shop", "trainer", format, "page", step=step)
    assert drawn.endswith("\n") and not drawn.endswith("\n\n")
    assert all(name in drawn for name in ("cut", "find", "pages.parse"))
    assert format != "svg" or not svg.outside(drawn)


def test_an_unknown_focus_is_a_sentence(shop: Callable[..., Graph]) -> None:
    """With a hint at the nearest name."""
    with pytest.raises(UserError, match=r"no node \[pag\] to draw; did you mean 'page'") as caught:
        draw(shop(), "shop", "trainer", focus="pag")
    assert caught.value.exit_code == 2


def test_the_command_line_takes_all_of_it(workshop: Project, capsys: pytest.CaptureFixture[str]) -> None:
    """Options reach the picture, which is titled by the recipe; an overlay's value does, too."""
    words = ["draw", "small", "--format", "svg", "--focus", "page", 'page.filters=[{use = "pages.parse"}]']
    assert main(words, workshop) == 0
    assert [one.text for one in svg.words(capsys.readouterr().out)][:1] == ["small: [page]"]
    assert main([*words, "--step"], workshop) == 0
    assert "page.filters[0]" in capsys.readouterr().out
