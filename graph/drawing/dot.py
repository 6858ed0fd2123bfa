"""A picture as DOT, the language of Graphviz, which need not be installed."""

from drawloom.graph.drawing.diagram import Diagram
from drawloom.graph.drawing.svg import colours

ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


def draw_dot(picture: Diagram) -> str:
    """A directed graph from left to right, boxes in the colours of their subjects."""
    fills = colours(picture.subjects)
    lines = [
        f"digraph {_quoted(picture.title)} {{",
        "  rankdir=LR",
        '  node [shape=box, style="rounded,filled", fontname="Helvetica", fontsize=11]',
        '  edge [fontname="Helvetica", fontsize=9]',
    ]
    for box in picture.boxes:
        more = ", penwidth=3" if box.name == picture.focus else ""
        label = f'"{box.name.translate(ESCAPES)}\\n{box.use.translate(ESCAPES)}"'
        lines.append(f'  {_quoted(box.name)} [label={label}, fillcolor="{fills[box.subject].pale}"{more}]')
    for arrow in picture.arrows:
        lines.append(f"  {_quoted(arrow.source)} -> {_quoted(arrow.target)} [label={_quoted(arrow.label)}]")
    return "\n".join([*lines, "}"]) + "\n"


def _quoted(text: str) -> str:
    return f'"{text.translate(ESCAPES)}"'
