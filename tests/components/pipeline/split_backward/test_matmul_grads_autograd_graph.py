"""Every leaf of a graph is found, and who uses it."""

import torch
from torch import Tensor

from drawloom.components.pipeline.split_backward.matmul_grads import LEAF, Users, users_of
from drawloom.kernels.linear import linear_eager


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape or (3, 3), requires_grad=True)


def leaves_of(users: Users, names: dict[str, Tensor]) -> dict[str, list[str]]:
    """For each leaf the names of the nodes that use it."""
    called = {id(tensor): name for name, tensor in names.items()}
    return {
        called[id(node.variable)]: sorted("output" if user is None else user.name() for user in its)  # type: ignore[attr-defined]
        for node, its in users.items()
        if type(node) is LEAF
    }


def test_every_leaf_with_all_its_uses() -> None:
    """Of operations of ours and of torch's, through other leaves, and as an output; an input is none."""
    x, a, b, c, d = (leaf() for _ in range(5))
    y = linear_eager(x, a) @ (b * c) + c
    assert leaves_of(users_of([y, d], [x]), {"a": a, "b": b, "c": c, "d": d}) == {
        "a": ["_LinearBackward"],
        "b": ["MulBackward0"],
        "c": ["AddBackward0", "MulBackward0"],
        "d": ["output"],
    }


def test_a_node_may_use_a_leaf_twice() -> None:
    """Each edge counts."""
    w = leaf()
    assert leaves_of(users_of([w * w], []), {"w": w}) == {"w": ["MulBackward0"] * 2}


def test_the_graph_beyond_an_input_is_somebody_else_s() -> None:
    """An input that was computed is where the walk ends."""
    a, b = leaf(), leaf()
    x = leaf() @ a
    assert leaves_of(users_of([x @ b], [x]), {"b": b}) == {"b": ["MmBackward0"]}
    assert users_of([x], [x]) == {}


def test_a_deep_graph() -> None:
    """Thousands of nodes in a row take no recursion, and those that are met often are gone through once."""
    x, w = leaf(), leaf()
    y = x
    for _ in range(3000):
        y = y + y
    users = users_of([y * w], [x])
    assert len(users) == 3000 + 2
    assert sorted(map(len, users.values())) == [1, 1, 1, *[2] * 2999]
