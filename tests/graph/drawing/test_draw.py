"""The output of `draw`."""

import re
from collections.abc import Callable

import pytest

from drawloom.graph.cli.main import main
from drawloom.graph.drawing import FORMATS, Format
from drawloom.graph.drawing.diagram import Arrow, Box, Diagram, make_wiring_diagram
from drawloom.graph.drawing.draw import draw, draw_dot, draw_mermaid
from drawloom.graph.problems import UserError
from drawloom.graph.project import Project
from drawloom.graph.wiring.graph import Graph
from support import svg

FILTERS = """
[cut]
use = "pages.parse"
[find]
use = "pages.look_up"
[page]
filters = ["@cut", "@find"]
"""


def test_a_focused_tree_lists_the_users_of_the_node(shop: Callable[..., Graph]) -> None:
    """The focused tree lists the users of a node first and then its needs."""
    assert draw(shop(FILTERS), "shop", "trainer", focus="page").splitlines() == [
        "used by [trainer] pages",
        "[page] pages.plain",
        "├── store: [store] stores.memory",
        "├── filters: [cut] pages.parse",
        "└── filters: [find] pages.look_up",
    ]


def test_a_step_as_text_lists_reads_changes_and_writes(shop: Callable[..., Graph]) -> None:
    """A step as text numbers its members and lists their values on the lines below."""
    assert draw(shop(FILTERS), "shop", "trainer", focus="page", step=True).splitlines() == [
        "shop: [page] filters",
        "  1. [cut] pages.parse",
        "     writes words",
        "  2. [find] pages.look_up",
        "     reads words, user (not written)",
    ]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("step", [False, True])
def test_every_format_names_all_nodes_and_ends_with_a_line_end(
    shop: Callable[..., Graph], format: Format, step: bool
) -> None:
    """Every format contains all node and component names and ends with a single line end."""
    drawn = draw(shop(FILTERS), "shop", "trainer", format, "page", step=step)
    assert drawn.endswith("\n") and not drawn.endswith("\n\n")
    assert all(name in drawn for name in ("cut", "find", "pages.parse"))
    assert format != "svg" or not svg.outside(drawn)


def test_an_unknown_focus_is_a_user_error(shop: Callable[..., Graph]) -> None:
    """The error suggests the nearest name."""
    with pytest.raises(UserError, match=r"no node \[pag\] to draw; did you mean 'page'") as caught:
        draw(shop(), "shop", "trainer", focus="pag")
    assert caught.value.exit_code == 2


def test_draw_accepts_format_focus_and_step(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    """Options and values of the command line change the picture, which has the recipe's name as title."""
    words = ["draw", "small", "--format", "svg", "--focus", "page", 'page.filters=[{use = "pages.parse"}]']
    assert main(words, project) == 0
    assert [word.text for word in svg.words(capsys.readouterr().out)][:1] == ["small: [page]"]
    assert main([*words, "--step"], project) == 0
    assert "page.filters[0]" in capsys.readouterr().out


PICTURE = Diagram("t", (Box("end", "a.b"), Box('x"<y>', "a.c")), (Arrow("end", 'x"<y>', ("one", "#2")),), focus="end")


def test_names_are_escaped_in_every_format() -> None:
    """Mermaid quotes keywords and writes quotes and angle brackets as entities."""
    assert draw_mermaid(PICTURE).splitlines() == [
        "flowchart LR",
        '  n0["end<br><i>a.b</i>"]',
        '  n1["x#quot;#lt;y#gt;<br><i>a.c</i>"]',
        '  n0 -->|"one, #35;2"| n1',
        "  style n0 stroke-width:3px",
    ]


def test_mermaid_has_a_line_for_every_node_and_arrow(first_run: Graph) -> None:
    """Mermaid has one line per node and arrow, and one line for the kind of chart."""
    picture = make_wiring_diagram(first_run, "first_run", "trainer")
    assert len(draw_mermaid(picture).splitlines()) == 1 + len(picture.boxes) + len(picture.arrows)


QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')


def test_quotes_and_backslashes_do_not_end_a_name() -> None:
    """Quotes are closed in every line, and names read back unchanged."""
    name = 'a"b\\'
    drawn = draw_dot(Diagram(name, (Box(name, "x.y"),), (Arrow(name, name, (name,)),)))
    names = [re.sub(r"\\(.)", r"\1", text) for text in QUOTED.findall(drawn.splitlines()[-2])]
    assert names == [name, name, name]
    assert all('"' not in QUOTED.sub("", line) for line in drawn.splitlines())


def test_dot_has_a_line_for_every_node_and_arrow(first_run: Graph) -> None:
    """DOT has a line with name and component per node, a line per arrow, and one thick frame."""
    picture = make_wiring_diagram(first_run, "first_run", "trainer", "stages")
    lines = [line for line in draw_dot(picture).splitlines() if line.startswith('  "')]
    nodes, arrows = [line for line in lines if "->" not in line], [line for line in lines if "->" in line]
    assert [QUOTED.findall(line)[:2] for line in nodes] == [[b.name, f"{b.name}\\n{b.use}"] for b in picture.boxes]
    assert [QUOTED.findall(line)[:2] for line in arrows] == [[a.source, a.target] for a in picture.arrows]
    assert sum("penwidth=3" in line for line in nodes) == 1
