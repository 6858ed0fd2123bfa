"""What `draw` prints: the wiring, or a walk through a sequence, in one of four formats."""

from collections.abc import Callable
from typing import Literal, get_args

from drawloom.graph.build.graph import Graph
from drawloom.graph.drawing.diagram import Diagram, wiring
from drawloom.graph.drawing.dot import draw_dot
from drawloom.graph.drawing.mermaid import draw_mermaid
from drawloom.graph.drawing.step import step_of
from drawloom.graph.drawing.step_svg import draw_step
from drawloom.graph.drawing.step_text import draw_step_text
from drawloom.graph.drawing.wiring_svg import draw_wiring
from drawloom.graph.inspect.text_tree import draw_tree
from drawloom.graph.problems import UserError
from drawloom.graph.toml.suggest import did_you_mean

Format = Literal["tree", "mermaid", "dot", "svg"]
FORMATS: tuple[Format, ...] = get_args(Format)

PICTURES: dict[Format, Callable[[Diagram], str]] = {"mermaid": draw_mermaid, "dot": draw_dot, "svg": draw_wiring}


def draw(graph: Graph, title: str, root: str, format: Format = "tree", focus: str = "", *, step: bool = False) -> str:
    """
    A graph without faults as text that ends with its last line.

    The wiring below `root`, or around `focus`; with `step`, the walk through the sequence edge of one of them. A
    UserError if there is no such node, or no sequence.
    """
    if focus and focus not in graph.nodes:
        hint = did_you_mean(focus, graph.nodes)
        raise UserError(f"there is no node [{focus}] to draw; {hint}".rstrip("; "), 2)
    if step:
        return _draw_step(graph, title, focus or root, format)
    if format == "tree":
        return _tree(graph, focus or root, focus)
    return PICTURES[format](wiring(graph, f"{title}: [{focus}]" if focus else title, root, focus))


def _draw_step(graph: Graph, title: str, name: str, format: Format) -> str:
    step = step_of(graph, title, name)
    if format == "tree":
        return draw_step_text(step)
    return draw_step(step) if format == "svg" else PICTURES[format](step.picture())


def _tree(graph: Graph, root: str, focus: str) -> str:
    used = [f"used by [{user}] {', '.join(keys)}" for user, keys in graph.incoming(focus)] if focus else []
    return "\n".join([*used, draw_tree(graph, root)]) + "\n"
