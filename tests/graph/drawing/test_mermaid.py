"""A picture as Mermaid."""

from drawloom.graph.build.graph import Graph
from drawloom.graph.drawing.diagram import Arrow, Box, Diagram, wiring
from drawloom.graph.drawing.mermaid import draw_mermaid

PICTURE = Diagram("t", (Box("end", "a.b"), Box('x"<y>', "a.c")), (Arrow("end", 'x"<y>', ("one", "#2")),), focus="end")


def test_names_are_labels_and_never_syntax() -> None:
    """Keywords, quotes and angles stand in quoted labels, as entities."""
    assert draw_mermaid(PICTURE).splitlines() == [
        "flowchart LR",
        '  n0["end<br><i>a.b</i>"]',
        '  n1["x#quot;#lt;y#gt;<br><i>a.c</i>"]',
        '  n0 -->|"one, #35;2"| n1',
        "  style n0 stroke-width:3px",
    ]


def test_every_node_and_arrow_is_a_line(first_run: Graph) -> None:
    """One line each, and one for the kind of chart."""
    picture = wiring(first_run, "first_run", "trainer")
    assert len(draw_mermaid(picture).splitlines()) == 1 + len(picture.boxes) + len(picture.arrows)
