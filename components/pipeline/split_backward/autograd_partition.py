"""
Where the paths of weights join the path of activations in an autograd graph.

The *trunk* is every node that the pass for the inputs goes through: those that lead to an input of the stage, or to an
operation that puts its own weight's gradient off. What hangs off it leads to weights alone, and falls into groups that
share no node: the gradients of one group can be found without touching another. The idea, of walking from the weights
to where they meet the inputs, is that of torch.distributed.pipelining; a group may here also hang off an output.
"""

from collections.abc import Container, Iterable, Sequence

import attrs
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from drawloom.kernels.deferred_grads import Deferral


@attrs.define(eq=False)
class JoinEdge:
    """An edge from the trunk (from an output of the stage, if `node` is None) to a node that leads to weights alone."""

    node: Node | None
    position: int
    child: Node


@attrs.define(eq=False)
class ParamGroup:
    """Weights (leaves) whose paths share nodes, the nodes off the trunk that lead to them, and where those join it."""

    weights: list[Tensor] = attrs.field(factory=list)
    joins: list[JoinEdge] = attrs.field(factory=list)
    nodes: list[Node] = attrs.field(factory=list)

    def absorb(self, other: "ParamGroup") -> None:
        """Take over what another group has."""
        self.weights += other.weights
        self.joins += other.joins
        self.nodes += other.nodes


@attrs.define(eq=False)
class Paths:
    """The nodes between outputs and inputs, each after those that it leads to, and the groups that hang off there."""

    nodes: list[Node]
    groups: list[ParamGroup]

    def slots(self, node: Node, outputs: Sequence[Tensor]) -> list[GradientEdge]:
        """The edges over which gradients come to a node: from others, and from outside if it made an output."""
        roots = [get_gradient_edge(output) for output in outputs]
        numbers = {root.output_nr for root in roots if root.node is node}
        numbers |= {number for each in self.nodes for child, number in each.next_functions if child is node}
        return [GradientEdge(node, number) for number in sorted(numbers)]


def paths_of(outputs: Sequence[Tensor], inputs: Iterable[Tensor], deferral: Deferral) -> Paths:
    """How the weights are reached from the outputs, as far as no operation of ours puts their gradients off."""
    trunk: set[Node] = {get_gradient_edge(tensor).node for tensor in inputs}
    roots = [get_gradient_edge(output).node for output in outputs]
    children_of: dict[Node, list[Node]] = {}
    nodes: dict[Node, None] = {}
    groups = _Groups()
    stack = [root for root in roots if root not in trunk]
    while stack:
        node = stack[-1]
        children = children_of.get(node)
        if children is None:
            children_of[node] = children = [child for child, _ in node.next_functions if child is not None]
            stack += [child for child in children if child not in children_of and child not in trunk]
            continue
        stack.pop()
        if node in nodes:
            continue
        nodes[node] = None
        own = deferral.weight_of(node) if isinstance(node, BackwardCFunction) else None
        if own is None and trunk.isdisjoint(children):
            groups.add(node, children)
        else:
            trunk.add(node)
            if not trunk.issuperset(children):
                groups.join(node, trunk, own)
    for position, root in enumerate(roots):
        if root not in trunk:
            groups.of(root).joins.append(JoinEdge(None, position, root))
    return Paths(list(nodes), groups.all())


def leaf_of(node: Node) -> Tensor | None:
    """The leaf that a node adds gradients to, if it is such a node."""
    return node.variable if type(node).__name__ == "AccumulateGrad" else None  # type: ignore[attr-defined]


class _Groups:
    """Groups by node, merged as nodes turn out to share what they lead to."""

    def __init__(self) -> None:
        self._group: dict[Node, ParamGroup] = {}

    def add(self, node: Node, children: Sequence[Node]) -> None:
        """A node off the trunk, and those that it leads to, which have been added."""
        group = ParamGroup()
        for child in children:
            if (found := self._group[child]) is not group:
                group = self._merged(group, found)
        group.nodes.append(node)
        if (leaf := leaf_of(node)) is not None:
            group.weights.append(leaf)
        self._group[node] = group

    def join(self, node: Node, trunk: Container[Node], own: Tensor | None) -> None:
        """A node of the trunk, whose own weight does not count."""
        for position, (child, _) in enumerate(node.next_functions):
            if child is not None and child not in trunk and (own is None or leaf_of(child) is not own):
                self._group[child].joins.append(JoinEdge(node, position, child))

    def of(self, node: Node) -> ParamGroup:
        """The group of a node that was added."""
        return self._group[node]

    def all(self) -> list[ParamGroup]:
        """Every group that leads to a weight and hangs off something."""
        groups = {id(group): group for group in self._group.values()}.values()
        return [group for group in groups if group.joins and group.weights]

    def _merged(self, one: ParamGroup, other: ParamGroup) -> ParamGroup:
        if len(one.nodes) < len(other.nodes):
            one, other = other, one
        one.absorb(other)
        for node in other.nodes:
            self._group[node] = one
        return one
