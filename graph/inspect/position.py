"""What a node is to a whole graph: when it is built, and where in a sequence it stands."""

from collections.abc import Iterator

from drawloom.graph.build.graph import Graph

ENDS = {1: "st", 2: "nd", 3: "rd"}


def needed_ports(graph: Graph) -> list[type]:
    """Every port that some node of the graph asks for, once."""
    fields = (field for node in graph.nodes.values() for field in node.spec.fields.values())
    return list(dict.fromkeys(port for field in fields for port in field.ports))


def place_in_order(graph: Graph, name: str, root: str) -> Iterator[str]:
    """When a node is built."""
    order = graph.topological_order([root])
    if name not in order:
        yield f"not built: nothing that [{root}] needs leads to it"
        return
    needs = ", ".join(f"[{need}]" for need in graph.needs(name))
    yield f"built {ordinal(order.index(name) + 1)} of {len(order)}{f', after {needs}' if needs else ''}"


def places_in_sequences(graph: Graph, name: str) -> Iterator[str]:
    """Where a node stands in each sequence that it is a member of, and what passes through it."""
    for user, keys in graph.incoming(name):
        for key in keys:
            if graph.nodes[user].spec.fields[key].kind == "ordered":
                yield from _in_sequence(graph, name, graph.nodes[user].edges[key].targets, f"[{user}] {key}")


def _in_sequence(graph: Graph, name: str, members: tuple[str, ...], title: str) -> Iterator[str]:
    flow = graph.nodes[name].spec.traits.flow
    number = members.index(name)
    yield f"{ordinal(number + 1)} of {len(members)} in {title}"
    before, after = members[:number], members[number + 1 :]
    for value in (*flow.reads, *flow.changes):
        plain = value.removesuffix("?")
        verb = "changes" if value in flow.changes else "reads"
        writers = [f"[{other}]" for other in before if plain in graph.nodes[other].spec.traits.flow.writes]
        if writers or value == plain:
            yield f"  {verb} {plain}, written by {' and '.join(writers) or 'nobody'}"
    for value in flow.writes:
        readers = [f"[{other}]" for other in after if _takes(graph, other, value)]
        yield f"  writes {value}, taken by {' and '.join(readers) or 'no later member'}"


def _takes(graph: Graph, name: str, value: str) -> bool:
    flow = graph.nodes[name].spec.traits.flow
    return bool({value, f"{value}?"} & {*flow.reads, *flow.changes})


def ordinal(number: int) -> str:
    """1st, 2nd, 3rd, 4th ..."""
    end = "th" if number % 100 in (11, 12, 13) else ENDS.get(number % 10, "th")
    return f"{number}{end}"
