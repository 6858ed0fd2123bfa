"""A picture as Mermaid text, which GitHub and many editors draw."""

from drawloom.graph.drawing.diagram import Diagram

ENTITIES = str.maketrans(
    {"#": "#35;", '"': "#quot;", "<": "#lt;", ">": "#gt;", "&": "#amp;", "`": "#96;", "|": "#124;", "\n": " "}
)
"""What would end a label or be read as markup, in Mermaid's own spelling."""


def draw_mermaid(picture: Diagram) -> str:
    """A flowchart from left to right; nodes are numbered, since names such as `end` mean something in Mermaid."""
    numbers = {box.name: f"n{number}" for number, box in enumerate(picture.boxes)}
    lines = ["flowchart LR"]
    lines += [f'  {numbers[box.name]}["{_safe(box.name)}<br><i>{_safe(box.use)}</i>"]' for box in picture.boxes]
    for arrow in picture.arrows:
        lines.append(f'  {numbers[arrow.source]} -->|"{_safe(arrow.label)}"| {numbers[arrow.target]}')
    if picture.focus:
        lines.append(f"  style {numbers[picture.focus]} stroke-width:3px")
    return "\n".join(lines) + "\n"


def _safe(text: str) -> str:
    return text.translate(ENTITIES)
