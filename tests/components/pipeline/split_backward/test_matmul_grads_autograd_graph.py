"""find_node_users finds every leaf of a graph and its users."""

import torch
from torch import Tensor

from drawloom.components.pipeline.split_backward.matmul_grads import Users, find_node_users
from drawloom.kernels.linear import linear_eager
from drawloom.kernels.recompute.saved_tensors import LEAF


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape or (3, 3), requires_grad=True)


def leaves_of(users: Users, names: dict[str, Tensor]) -> dict[str, list[str]]:
    """Return the names of the nodes that use a leaf, by leaf."""
    called = {id(tensor): name for name, tensor in names.items()}
    return {
        called[id(node.variable)]: sorted("output" if user is None else user.name() for user in its)  # type: ignore[attr-defined]
        for node, its in users.items()
        if type(node) is LEAF
    }


def test_every_leaf_is_found_with_all_its_users() -> None:
    """Users among our kernels and torch's operations, and outputs, are found; an input is not among the leaves."""
    x, a, b, c, d = (leaf() for _ in range(5))
    y = linear_eager(x, a) @ (b * c) + c
    assert leaves_of(find_node_users([y, d], [x]), {"a": a, "b": b, "c": c, "d": d}) == {
        "a": ["_LinearBackward"],
        "b": ["MulBackward0"],
        "c": ["AddBackward0", "MulBackward0"],
        "d": ["output"],
    }


def test_a_node_that_uses_a_leaf_twice_counts_twice() -> None:
    """Every edge in the graph is a use."""
    w = leaf()
    assert leaves_of(find_node_users([w * w], []), {"w": w}) == {"w": ["MulBackward0"] * 2}


def test_the_search_ends_at_inputs() -> None:
    """The graph behind a computed input is not searched."""
    a, b = leaf(), leaf()
    x = leaf() @ a
    assert leaves_of(find_node_users([x @ b], [x]), {"b": b}) == {"b": ["MmBackward0"]}
    assert find_node_users([x], [x]) == {}


def test_a_deep_graph_needs_no_recursion() -> None:
    """Thousands of nodes in a row are searched without recursion, once apiece."""
    x, w = leaf(), leaf()
    y = x
    for _ in range(3000):
        y = y + y
    users = find_node_users([y * w], [x])
    assert len(users) == 3000 + 2
    assert sorted(map(len, users.values())) == [1, 1, 1, *[2] * 2999]
