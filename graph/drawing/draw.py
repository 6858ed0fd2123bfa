"""`drawloom draw`: the wiring, or the dataflow of a sequence, as a text tree, Mermaid, DOT or SVG."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from drawloom.graph.drawing import FORMATS, Format
from drawloom.graph.drawing.diagram import Diagram, SequenceDrawing, make_sequence_drawing, make_wiring_diagram
from drawloom.graph.drawing.svg import assign_colours, draw_step, draw_wiring
from drawloom.graph.inspect.explain import collect_notes
from drawloom.graph.problems import UserError, did_you_mean
from drawloom.graph.wiring.graph import Graph


def draw_tree(graph: Graph, root: str) -> str:
    """
    Draw `root` and its dependencies as a tree, one node per line. Dependencies appear only at a node's first
    occurrence.
    """
    seen: set[str] = set()
    lines: list[str] = []
    stack = [_Branch(root, "", "", "")]
    while stack:
        name, label, line, indent = stack.pop()
        is_repeated = name in seen and bool(graph.needs(name))
        lines.append(f"{line}{label}[{name}] {graph.nodes[name].spec.use}{' (above)' if is_repeated else ''}")
        if not is_repeated:
            seen.add(name)
            stack += reversed(_list_branches(graph, name, indent))
    return "\n".join(lines)


class _Branch(NamedTuple):
    """A dependency in a tree: its node and field, and the lines drawn before it and before its own dependencies."""

    name: str
    label: str
    line: str
    indent: str


def _list_branches(graph: Graph, name: str, indent: str) -> list[_Branch]:
    edges = [(target, field) for field, edge in graph.nodes[name].edges.items() for target in edge.targets]
    ends = [number == len(edges) - 1 for number in range(len(edges))]
    return [
        _Branch(target, f"{field}: ", f"{indent}{'└── ' if end else '├── '}", f"{indent}{'    ' if end else '│   '}")
        for (target, field), end in zip(edges, ends, strict=True)
    ]


def _format_members(step: SequenceDrawing) -> Iterator[str]:
    for number, box in enumerate(step.members):
        yield f"{number + 1:3d}. [{box.name}] {box.use}"
        for verb in ("reads", "changes", "writes"):
            values = [trace.title for trace in step.traces if trace.access_by_member.get(number) == verb]
            if values:
                yield f"     {verb} {', '.join(values)}"


ENTITIES = str.maketrans(
    {"#": "#35;", '"': "#quot;", "<": "#lt;", ">": "#gt;", "&": "#amp;", "`": "#96;", "|": "#124;", "\n": " "}
)
"""Characters that would end a label or act as markup, as entities for Mermaid."""


def draw_mermaid(diagram: Diagram) -> str:
    """Draw a flowchart from left to right. Nodes are numbered, because names such as `end` are keywords in Mermaid."""
    numbers = {box.name: f"n{number}" for number, box in enumerate(diagram.boxes)}
    lines = ["flowchart LR"]
    lines += [
        f'  {numbers[box.name]}["{_escape_mermaid(box.name)}<br><i>{_escape_mermaid(box.use)}</i>"]'
        for box in diagram.boxes
    ]
    for arrow in diagram.arrows:
        lines.append(f'  {numbers[arrow.source]} -->|"{_escape_mermaid(arrow.label)}"| {numbers[arrow.target]}')
    if diagram.focus:
        lines.append(f"  style {numbers[diagram.focus]} stroke-width:3px")
    return "\n".join(lines) + "\n"


def _escape_mermaid(text: str) -> str:
    return text.translate(ENTITIES)


# DOT strings have no other escapes.
ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


def draw_dot(diagram: Diagram) -> str:
    """Draw a directed graph from left to right, with boxes in their subjects' colours."""
    fills = assign_colours(diagram.component_folders)
    lines = [
        f"digraph {_quote_dot_string(diagram.title)} {{",
        "  rankdir=LR",
        '  node [shape=box, style="rounded,filled", fontname="Helvetica", fontsize=11]',
        '  edge [fontname="Helvetica", fontsize=9]',
    ]
    for box in diagram.boxes:
        style = ", penwidth=3" if box.name == diagram.focus else ""
        label = f'"{box.name.translate(ESCAPES)}\\n{box.use.translate(ESCAPES)}"'
        lines.append(
            f'  {_quote_dot_string(box.name)} [label={label}, fillcolor="{fills[box.component_folder].pale}"{style}]'
        )
    for arrow in diagram.arrows:
        ends = f"{_quote_dot_string(arrow.source)} -> {_quote_dot_string(arrow.target)}"
        lines.append(f"  {ends} [label={_quote_dot_string(arrow.label)}]")
    return "\n".join([*lines, "}"]) + "\n"


def _quote_dot_string(text: str) -> str:
    return f'"{text.translate(ESCAPES)}"'


PICTURES: dict[Format, Callable[[Diagram], str]] = {"mermaid": draw_mermaid, "dot": draw_dot, "svg": draw_wiring}


def draw(graph: Graph, title: str, root: str, format: Format = "tree", focus: str = "", *, step: bool = False) -> str:
    """
    Draw a valid graph as text in a format, with a newline at the end.

    The drawing shows `root` and its dependencies, or the surroundings of the node `focus`. With `step`, it shows the
    dataflow of the sequence edge of `focus` or `root`. Raises UserError for an unknown format or node, or without a
    sequence.
    """
    if format not in FORMATS:
        raise UserError(f"there is no format {format!r}; {did_you_mean(format, FORMATS)}", 2)
    if focus and focus not in graph.nodes:
        hint = did_you_mean(focus, graph.nodes)
        raise UserError(f"there is no node [{focus}] to draw; {hint}".rstrip("; "), 2)
    if step:
        return _draw_step(graph, title, focus or root, format)
    if format == "tree":
        return _draw_tree(graph, focus or root, focus)
    return PICTURES[format](make_wiring_diagram(graph, f"{title}: [{focus}]" if focus else title, root, focus))


def _draw_step(graph: Graph, title: str, name: str, format: Format) -> str:
    step = make_sequence_drawing(graph, title, name)
    if format == "tree":
        return "\n".join([step.title, *_format_members(step)]) + "\n"
    return draw_step(step) if format == "svg" else PICTURES[format](step.diagram())


def _draw_tree(graph: Graph, root: str, focus: str) -> str:
    users = (
        [f"used by [{user}] {', '.join(keys)}" for user, keys in graph.list_users_with_edge_names(focus)]
        if focus
        else []
    )
    notes = collect_notes(graph, graph.nodes[focus]) if focus else ()
    return "\n".join([*users, *notes, draw_tree(graph, root)]) + "\n"
