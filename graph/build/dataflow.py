"""The order of a sequence edge, checked like a dataflow: nothing is read before it is written or changed too late."""

from collections.abc import Iterator, Mapping

import attrs

from drawloom.graph.build.node import Edge, Node
from drawloom.graph.component import Flow
from drawloom.graph.problems import Problem


@attrs.frozen
class Member:
    """One member of a sequence: its name, its place in the sequence, and what it does to values."""

    name: str
    number: int
    flow: Flow


def check_sequence(node: Node, field: str, edge: Edge, nodes: Mapping[str, Node]) -> Iterator[Problem]:
    """Everything that is out of order in one sequence edge."""
    members = [Member(name, number, nodes[name].spec.traits.flow) for number, name in enumerate(edge.targets)]
    for member in members:
        place = node.place_of(edge.items[member.number])
        for text, hint in _faults(member, members, edge.incomplete):
            yield Problem("DL330", f"{field}: {text}", hint, node.name, place)


def _faults(member: Member, members: list[Member], unmade: bool) -> Iterator[tuple[str, str]]:
    for name in (*member.flow.reads, *member.flow.changes):
        value, verb = name.removesuffix("?"), "changes" if name in member.flow.changes else "reads"
        writers = [other for other in members if value in other.flow.writes]
        if not writers and (name != value or unmade):
            continue  # it need not be written, or is by a member that is at fault itself
        if not writers:
            yield f"[{member.name}] {verb} {value}, which nothing in the sequence writes", "add a member that writes it"
        elif writers[0].number >= member.number:
            writer = writers[0].name
            hint = f'move "@{member.name}" behind "@{writer}"'
            yield f"[{member.name}] {verb} {value} before [{writer}] writes it", hint
    for value in member.flow.changes:
        readers = [other for other in members if {value, f"{value}?"} & {*other.flow.reads}]
        if readers and readers[-1].number < member.number:
            reader = readers[-1].name
            text = f"[{member.name}] changes {value} after [{reader}], the last to read it, so the change is lost"
            yield text, f'move "@{member.name}" before "@{reader}"'
