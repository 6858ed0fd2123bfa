"""Graphs as pictures: Mermaid and DOT as text for other programs, SVG with our own layout."""

from typing import Literal, get_args

Format = Literal["tree", "mermaid", "dot", "svg"]
FORMATS: tuple[Format, ...] = get_args(Format)
