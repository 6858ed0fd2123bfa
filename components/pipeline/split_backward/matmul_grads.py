"""
The weight of a foreign matrix product, whose gradient is found without going through the graph again.

`nn.Linear` and `x @ weight` leave a node `mm` or `addmm` in the graph, which leads to the weight itself or to its
transpose. The other factor is all that the gradient needs, so that it can wait as it does for an operation of ours.
"""

from collections.abc import Callable

import attrs
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from drawloom.components.pipeline.split_backward.autograd_partition import JoinEdge, leaf_of

FACTORS = {"MmBackward0": (0, "self", "mat2"), "AddmmBackward0": (1, "mat1", "mat2")}
"""By the name of a node: the position of its first factor among its edges, and what both are saved as."""


@attrs.frozen(eq=False)
class Product:
    """A matrix product with a weight: what comes in over `edge` and the other factor give the weight's gradient."""

    weight: Tensor
    gradient: Callable[[Tensor, Tensor], Tensor]
    factor: Tensor
    edge: GradientEdge


def product_of(join: JoinEdge) -> Product | None:
    """The product that a weight joins the activations by, if it does so by one and all that it needs is at hand."""
    weight, transposed = _weight(join.child)
    if join.node is None or weight is None or (found := FACTORS.get(type(join.node).__name__)) is None:
        return None
    first, *names = found
    side = join.position - first
    if side not in (0, 1) or getattr(join.node, "_saved_alpha", 1) != 1:
        return None
    if getattr(join.node, f"_raw_saved_{names[1 - side]}").unpack_hook is not None:
        return None  # it is recomputed or fetched from elsewhere, which the node itself will do, and but once
    factor: Tensor = getattr(join.node, f"_saved_{names[1 - side]}").detach()
    if factor.is_complex() or factor.layout != weight.layout:
        return None
    return Product(weight, _GRADIENTS[side, transposed], factor, GradientEdge(join.node, 0))


def _weight(node: Node) -> tuple[Tensor | None, bool]:
    """The leaf that a node stands for, and whether it stands for its transpose."""
    if type(node).__name__ == "TBackward0":
        child = node.next_functions[0][0]
        return (None if child is None else leaf_of(child)), True
    return leaf_of(node), False


_GRADIENTS: dict[tuple[int, bool], Callable[[Tensor, Tensor], Tensor]] = {
    (1, False): lambda grad, other: other.t() @ grad,
    (1, True): lambda grad, other: grad.t() @ other,
    (0, False): lambda grad, other: grad @ other.t(),
    (0, True): lambda grad, other: other @ grad.t(),
}
"""By the side on which the weight stands, and whether as its transpose."""
