"""A picture as DOT."""

import re

from drawloom.graph.build.graph import Graph
from drawloom.graph.drawing.diagram import Arrow, Box, Diagram, wiring
from drawloom.graph.drawing.dot import draw_dot

QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')


def test_quotes_and_backslashes_do_not_end_a_name() -> None:
    """Every line is closed, and names read back as they were."""
    name = 'a"b\\'
    drawn = draw_dot(Diagram(name, (Box(name, "x.y"),), (Arrow(name, name, (name,)),)))
    found = [re.sub(r"\\(.)", r"\1", text) for text in QUOTED.findall(drawn.splitlines()[-2])]
    assert found == [name, name, name]
    assert all('"' not in QUOTED.sub("", line) for line in drawn.splitlines())


def test_every_node_and_arrow_is_a_line(first_run: Graph) -> None:
    """Nodes with both of their names and a colour, arrows between nodes that were named before."""
    picture = wiring(first_run, "first_run", "trainer", "stages")
    lines = [line for line in draw_dot(picture).splitlines() if line.startswith('  "')]
    nodes, arrows = [line for line in lines if "->" not in line], [line for line in lines if "->" in line]
    assert [QUOTED.findall(line)[:2] for line in nodes] == [[b.name, f"{b.name}\\n{b.use}"] for b in picture.boxes]
    assert [QUOTED.findall(line)[:2] for line in arrows] == [[a.source, a.target] for a in picture.arrows]
    assert sum("penwidth=3" in line for line in nodes) == 1
