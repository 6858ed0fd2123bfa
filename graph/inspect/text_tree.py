"""A graph as a text tree: what the root needs, and what that needs; each node in full once."""

from drawloom.graph.build.graph import Graph


def draw_tree(graph: Graph, root: str) -> str:
    """The tree below `root`, one node a line; a node that was drawn above is only named again."""
    seen: set[str] = set()
    lines: list[str] = []
    stack: list[tuple[str, str, str, str]] = [(root, "", "", "")]
    while stack:
        name, label, branch, indent = stack.pop()
        again = name in seen and bool(graph.needs(name))
        lines.append(f"{branch}{label}[{name}] {graph.nodes[name].spec.use}{' (above)' if again else ''}")
        if not again:
            seen.add(name)
            stack += reversed(_children(graph, name, indent))
    return "\n".join(lines)


def _children(graph: Graph, name: str, indent: str) -> list[tuple[str, str, str, str]]:
    edges = [(target, field) for field, edge in graph.nodes[name].edges.items() for target in edge.targets]
    ends = [number == len(edges) - 1 for number in range(len(edges))]
    return [
        (target, f"{field}: ", f"{indent}{'└── ' if end else '├── '}", f"{indent}{'    ' if end else '│   '}")
        for (target, field), end in zip(edges, ends, strict=True)
    ]
