"""Which weights hang together off the trunk of a graph, and where."""

from typing import Any

import torch
from torch import Tensor

from drawloom.components.pipeline.split_backward.autograd_partition import paths_of
from drawloom.kernels.deferred_grads import Deferral
from drawloom.kernels.linear import linear_eager


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape or (3, 3), requires_grad=True)


def groups_of(outputs: list[Tensor], inputs: list[Tensor], names: dict[str, Tensor], deferral: Any = None) -> set[Any]:
    """For each group the names of its weights, and the kinds of nodes that it joins (None for an output)."""
    found = paths_of(outputs, inputs, deferral or Deferral()).groups
    called = {id(tensor): name for name, tensor in names.items()}
    return {
        (
            "".join(sorted(called[id(weight)] for weight in group.weights)),
            tuple(sorted(join.node.name() if join.node else "output" for join in group.joins)),
        )
        for group in found
    }


def test_each_weight_joins_by_itself() -> None:
    """Weights that share nothing are groups of their own, and the input is none."""
    x, a, b, c = (leaf() for _ in range(4))
    y = (x @ a.t() + c) @ b
    assert groups_of([y], [x], {"a": a, "b": b, "c": c}) == {
        ("a", ("MmBackward0",)),
        ("b", ("MmBackward0",)),
        ("c", ("AddBackward0",)),
    }


def test_what_shares_a_node_off_the_trunk_is_one_group() -> None:
    """A product of weights, and a weight used in two places."""
    x, u, v, w = (leaf() for _ in range(4))
    y = torch.tanh(x @ (u @ v) @ u) * w
    assert groups_of([y], [x], {"u": u, "v": v, "w": w}) == {
        ("uv", ("MmBackward0", "MmBackward0")),
        ("w", ("MulBackward0",)),
    }


def test_without_a_trunk_everything_hangs_off_the_outputs() -> None:
    """Where no input needs a gradient, or an output does not depend on one, weights are reached from the outputs."""
    x, a, b, c = (leaf() for _ in range(4))
    names = {"a": a, "b": b, "c": c}
    assert groups_of([x.detach() @ a @ b], [], names) == {("ab", ("output",))}
    assert groups_of([x @ a, b @ c], [x], names) == {("a", ("MmBackward0",)), ("bc", ("output",))}
    assert groups_of([x @ a, a @ c], [x], names) == {("ac", ("MmBackward0", "output"))}
    assert groups_of([a], [x], names) == {("a", ("output",))}


def test_our_operations_are_part_of_the_trunk() -> None:
    """Their own weight needs no group, their input leads on, and a weight that is computed joins them as others do."""
    tokens, a, b, c = (leaf() for _ in range(4))
    deferral = Deferral()
    with deferral.recording():
        y = linear_eager(linear_eager(tokens.detach(), a) @ b, c * 2)
    names = {"a": a, "b": b, "c": c}
    assert groups_of([y], [], names, deferral) == {("b", ("MmBackward0",)), ("c", ("_LinearBackward",))}
    assert groups_of([y], [], names) == {("abc", ("output",))}


def test_the_graph_beyond_an_input_is_somebody_else_s() -> None:
    """An input that was computed is where the walk ends."""
    a, b = leaf(), leaf()
    x = leaf() @ a
    assert groups_of([x @ b], [x], {"a": a, "b": b}) == {("b", ("MmBackward0",))}


def test_slots_are_those_over_which_gradients_come() -> None:
    """Of a node with several outputs, the ones that something was made of, or that are outputs of the stage."""
    x, w = leaf(2, 3), leaf(2, 3)
    first, second, third = (x * w).unbind(1)
    outputs = [first.exp(), third]
    node = second.grad_fn
    assert node is not None
    assert [edge.output_nr for edge in paths_of(outputs, [x], Deferral()).slots(node, outputs)] == [0, 2]


def test_a_deep_graph() -> None:
    """Thousands of nodes in a row take no recursion, and those that are met often are met once."""
    x, w = leaf(), leaf()
    y = x
    for _ in range(3000):
        y = y + y
    nodes = paths_of([y * w], [x], Deferral()).nodes
    assert len(nodes) == 3000 + 2
    order = {node: number for number, node in enumerate(nodes)}
    edges = [(node, child) for node in nodes for child, _ in node.next_functions if child in order]
    assert len(edges) == 2 * 2999 + 2
    assert all(order[child] < order[node] for node, child in edges if child is not None)
