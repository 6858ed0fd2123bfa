"""
Where the paths of weights join the path of activations in an autograd graph.

The *trunk* is every node that the pass for the inputs goes through: those that lead to an input of the stage, or to an
operation that puts its own weight's gradient off. What hangs off it leads to weights alone, and falls into groups that
share no node: the gradients of one group can be found without touching another. The idea, of walking from the weights
to where they meet the inputs, is that of torch.distributed.pipelining; a group may here also hang off an output.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from drawloom.kernels.deferral import Deferral

Edges = Mapping[Node, Sequence[tuple[Node | None, int]]]
"""What each node hands gradients to, and as which of its outputs."""


@attrs.define(eq=False)
class Join:
    """An edge from the trunk (from an output of the stage, if `node` is None) to a node that leads to weights alone."""

    node: Node | None
    position: int
    child: Node


@attrs.define(eq=False)
class Group:
    """Weights (leaves) whose paths share nodes, the nodes off the trunk that lead to them, and where those join it."""

    weights: list[Tensor] = attrs.field(factory=list)
    joins: list[Join] = attrs.field(factory=list)
    nodes: list[Node] = attrs.field(factory=list)

    def absorb(self, other: "Group") -> None:
        """Take over what another group has."""
        self.weights += other.weights
        self.joins += other.joins
        self.nodes += other.nodes


def edges_of(outputs: Sequence[Tensor], inputs: Iterable[Tensor]) -> tuple[Edges, set[Node]]:
    """The graph between outputs and inputs, every node after those that it leads to, and the nodes of the inputs."""
    sources = {get_gradient_edge(tensor).node for tensor in inputs}
    met: dict[Node, Any] = {}
    edges: dict[Node, Any] = {}
    stack = [get_gradient_edge(output).node for output in outputs]
    while stack:
        node = stack[-1]
        if node in edges:
            stack.pop()
        elif node in met:
            edges[node] = met[node]
            stack.pop()
        else:
            met[node] = found = () if node in sources else node.next_functions
            stack += [child for child, _ in found if child is not None and child not in met]
    return edges, sources


def weight_groups(outputs: Sequence[Tensor], edges: Edges, sources: set[Node], deferral: Deferral) -> list[Group]:
    """The groups of weights that hang off the trunk, or off an output that is not part of it."""
    trunk: set[Node | None] = set(sources)
    groups = _Groups()
    for node, found in edges.items():
        children = [child for child, _ in found]
        own = deferral.weight_of(node) if isinstance(node, BackwardCFunction) else None
        if trunk.isdisjoint(children) and own is None and node not in trunk:
            groups.add(node, children)
            continue
        trunk.add(node)
        if not trunk.issuperset(children):
            for position, child in enumerate(children):
                if child is not None and child not in trunk and (own is None or leaf_of(child) is not own):
                    groups.of(child).joins.append(Join(node, position, child))
    for position, output in enumerate(outputs):
        if (node := get_gradient_edge(output).node) not in trunk:
            groups.of(node).joins.append(Join(None, position, node))
    return [group for group in groups.all() if group.joins and group.weights]


def leaf_of(node: Node) -> Tensor | None:
    """The leaf that a node adds gradients to, if it is such a node."""
    return node.variable if type(node).__name__ == "AccumulateGrad" else None  # type: ignore[attr-defined]


def slots_of(node: Node, outputs: Sequence[Tensor], edges: Edges) -> list[GradientEdge]:
    """The edges over which gradients come to a node: from others, and from outside if it made an output."""
    roots = [get_gradient_edge(output) for output in outputs]
    numbers = {root.output_nr for root in roots if root.node is node}
    numbers |= {number for found in edges.values() for child, number in found if child is node}
    return [GradientEdge(node, number) for number in sorted(numbers)]


class _Groups:
    """Groups by node, merged as nodes turn out to share what they lead to."""

    def __init__(self) -> None:
        self._group: dict[Node, Group] = {}

    def add(self, node: Node, children: Sequence[Node | None]) -> None:
        """A node off the trunk, and those that it leads to, which have been added."""
        found = {id(group): group for child in children if child is not None if (group := self._group[child])}
        group = Group()
        for other in found.values():
            group = self._merged(group, other)
        group.nodes.append(node)
        if (leaf := leaf_of(node)) is not None:
            group.weights.append(leaf)
        self._group[node] = group

    def of(self, node: Node) -> Group:
        """The group of a node that was added."""
        return self._group[node]

    def all(self) -> list[Group]:
        """Every group once."""
        return list({id(group): group for group in self._group.values()}.values())

    def _merged(self, one: Group, other: Group) -> Group:
        if len(one.nodes) < len(other.nodes):
            one, other = other, one
        one.absorb(other)
        for node in other.nodes:
            self._group[node] = one
        return one
