"""The autograd graph of a stage: every leaf that it leads to, whoever owns it, and the nodes that lead there."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

Users = dict[Node | None, list[Node | None]]
"""By node, the nodes that have an edge to it; None stands for the outputs of the graph."""

LEAF: type[Node] = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
TRANSPOSE: type[Node] = torch._C._functions.TBackward0  # type: ignore[attr-defined]


def users_of(outputs: Iterable[Tensor], inputs: Iterable[Tensor]) -> Users:
    """
    All nodes between outputs and inputs, without those of the inputs and what lies beyond, with their users.

    It takes about 1 us a node. A graph is that of one microbatch; the next may lead to other leaves.
    """
    stops = [get_gradient_edge(tensor).node for tensor in inputs]
    roots = [(get_gradient_edge(output).node, 0) for output in outputs]
    users: Users = {node: [] for node in (None, *stops)}
    nodes: list[Node | None] = [None]
    for node in nodes:  # the list grows meanwhile
        for child, _ in roots if node is None else node.next_functions:
            if child in users:
                users[child].append(node)
            else:
                users[child] = [node]
                nodes.append(child)
    for node in {None, *stops}:
        del users[node]
    return users
