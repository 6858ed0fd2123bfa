"""
Deferred weight gradients of torch's own matmuls, which don't use kernels/deferred_grads.py; and accumulating them.

`nn.Linear` and `x @ weight` leave a node `mm` or `addmm` in the autograd graph, with an edge to the weight or to its
transpose. The weight's gradient needs only the gradient of the product and the other factor. A hook on the node
captures the former, after all other hooks have run. A transpose, and the hooks on it, run with the weight gradients.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from drawloom.kernels.deferred_grads import Deferral, DeferredGrad, MatrixProduct
from drawloom.kernels.recompute import LEAF, TRANSPOSE, Kept, Saved, held_by

Users = dict[Node | None, list[Node | None]]
"""By node, the nodes that have an edge to it; None stands for the outputs of the graph."""


def users_of(outputs: Iterable[Tensor], inputs: Iterable[Tensor]) -> Users:
    """
    The users of each node between outputs and inputs (tensors of any shape), without the inputs' own nodes and beyond.

    Takes about 1 us a node. It is computed for each microbatch, as the next one's graph may reach other leaves.
    """
    stops = [_node_of(tensor) for tensor in inputs]
    roots = [(_node_of(output), 0) for output in outputs]
    users: Users = {node: [] for node in (None, *stops)}
    nodes: list[Node | None] = [None]
    for node in nodes:  # a breadth-first search: the list grows during the loop
        for child, _ in roots if node is None else node.next_functions:
            if child in users:
                users[child].append(node)
            else:
                users[child] = [node]
                nodes.append(child)
    for node in {None, *stops}:
        del users[node]
    return users


def _node_of(tensor: Tensor) -> Node:
    """The node that made a tensor (any shape), or that adds up the gradient of a leaf."""
    # torch finds the first, too, but takes microseconds.
    return tensor.grad_fn or get_gradient_edge(tensor).node


CHUNK_BYTES = 2**22
"""Bytes of gradients that are computed before they are accumulated: more cost memory, fewer cost nodes (20 us each)."""


def accumulate_grads(deferred: Sequence[DeferredGrad]) -> None:
    """
    Compute the deferred gradients, and add each to its weight's `.grad`.

    Autograd makes a gradient a weight's `.grad` without a copy only if it holds the only reference. So gradients are
    computed within a node of the graph, one for each chunk of weights, and not beforehand.
    """
    # Autograd starts at the root created last, so the gradients deferred last come first: their tensors are still in
    # the caches.
    roots = [_weight_grads(chunk) for chunk in reversed(_chunks(deferred))]
    if roots:
        torch.autograd.backward(roots, [root.detach() for root in roots])  # _WeightGrads ignores its output's gradient


def _chunks(deferred: Sequence[DeferredGrad]) -> list[list[DeferredGrad]]:
    """Consecutive weights whose gradients take CHUNK_BYTES, or one weight if it takes more."""
    chunks: list[list[DeferredGrad]] = []
    bytes_left = 0
    for each in deferred:
        if bytes_left <= 0:
            chunks.append([])
            bytes_left = CHUNK_BYTES
        chunks[-1].append(each)
        bytes_left -= each.weight.nbytes
    return chunks


def _weight_grads(deferred: list[DeferredGrad]) -> Tensor:
    return _WeightGrads.apply(deferred, *[each.weight for each in deferred])  # type: ignore[no-untyped-call, no-any-return]


class _WeightGrads(Function):
    """A node whose backward pass computes deferred weight gradients."""

    # Its output is on the weights' device, so autograd runs the backward in the stream that is current there.

    @staticmethod
    def forward(ctx: Any, deferred: list[DeferredGrad], *weights: Tensor) -> Tensor:
        ctx.deferred = deferred
        return weights[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *[each.compute() for each in ctx.deferred]


FACTORS: dict[type[Node], tuple[str, str]] = {
    torch._C._functions.MmBackward0: ("self", "mat2"),  # type: ignore[attr-defined]
    torch._C._functions.AddmmBackward0: ("mat1", "mat2"),  # type: ignore[attr-defined]
}
"""By type of node, the names under which it saves its two factors; its last two edges lead to them."""


@attrs.define(eq=False)
class Product:
    """A node that multiplies a weight, or its transpose, by another factor."""

    node: Node
    weight: Tensor
    other: Saved
    gradient: Callable[[Tensor, Tensor], Tensor]

    def capture(self, deferred: DeferredGrad) -> RemovableHandle:
        """Register a hook that queues the weight's gradient when that of the product is computed."""

        def captured(_: object, grads: tuple[Tensor | None, ...]) -> None:
            if grads[0] is not None:
                deferred.queue(self.gradient, grads[0], self.other.value())

        return self.node.register_hook(captured)


def defer_products(users: Users, deferral: Deferral) -> tuple[list[Tensor], list[RemovableHandle]]:
    """
    Defer the gradients of leaves that only matmuls use.

    Returns the other leaves (tensors of any shape), and the hooks to remove afterwards.
    """
    others: list[Tensor] = []
    handles: list[RemovableHandle] = []
    for leaf, its_users in users.items():
        if type(leaf) is LEAF:
            captured = _capture(_products(leaf, users), deferral) if type(its_users[0]) in _CANDIDATES else []
            handles += captured
            if not captured:
                others.append(leaf.variable)  # type: ignore[attr-defined]
    return others, handles


_CANDIDATES = {*FACTORS, TRANSPOSE}
"""Types of nodes that may be a matmul: the type of a leaf's first user rules out most leaves at once."""


def _capture(products: list[Product], deferral: Deferral) -> list[RemovableHandle]:
    """Register hooks on all products; none if any has a foreign hook, which may change the weight's gradient."""
    handles = [product.capture(deferral.grad_for(product.weight)) for product in products]
    if all([*(handle.hooks_dict_ref() or ())] == [handle.id] for handle in handles):
        return handles
    for handle in handles:
        handle.remove()
    return []


def _products(leaf: Node, users: Users) -> list[Product]:
    """The matmuls that use a leaf or its transpose; none if anything else uses it."""
    products: list[Product] = []
    for user in users[leaf]:
        factor, nodes = (user, users[user]) if type(user) is TRANSPOSE else (leaf, [user])
        for node in nodes:
            product = product_of(node, factor, users)
            if product is None or leaf.variable._backward_hooks:  # type: ignore[attr-defined]
                return []  # the leaf's hook may need activations: then torch must see this gradient and raise an error
            products.append(product)
    return products


def product_of(node: Node | None, factor: Node, users: Users) -> Product | None:
    """The matmul of a node with `factor`, a weight; None if it is another node, or can't be deferred."""
    if node is None or (names := FACTORS.get(type(node))) is None:
        return None
    factors = [child for child, _ in node.next_functions][-2:]
    if factor not in factors or getattr(node, "_saved_alpha", 1) != 1:
        return None
    side = factors.index(factor)
    if not _leads_on(factors[1 - side], users):
        return None
    weight, other = _weight_of(node, factor, names[side]), _other_of(node, names[1 - side])
    if weight is None or other is None or weight.is_complex():
        return None
    if isinstance(other, Kept) and other.value().layout != weight.layout:
        return None
    # A gradient with the weight's own strides is accumulated without a copy.
    by_columns = weight.stride() == (1, len(weight))
    return Product(node, weight, other, _GRADIENTS[side, by_columns])


def _weight_of(node: Node, factor: Node, name: str) -> Tensor | None:
    """The weight or its transpose, with its graph; None if a transpose would have to be recomputed for that."""
    if type(factor) is LEAF:
        leaf: Tensor = factor.variable  # type: ignore[attr-defined]
        return leaf
    variable = getattr(node, f"_raw_saved_{name}")
    if variable.unpack_hook is not None and not isinstance(held_by(variable), Kept):
        return None
    transposed: Tensor = getattr(node, f"_saved_{name}")
    return transposed


def _other_of(node: Node, name: str) -> Saved | None:
    """The other factor, which may be recomputed; None if hooks hold it that may give it to the node alone."""
    variable = getattr(node, f"_raw_saved_{name}")
    return Kept(getattr(node, f"_saved_{name}")) if variable.unpack_hook is None else held_by(variable)


def _leads_on(node: Node | None, users: Users) -> bool:
    """Whether autograd runs a matmul's backward for its other factor alone, without a request for the weight's."""
    return node is not None and not (type(node) in (LEAF, TRANSPOSE) and node in users)


_GRADIENTS: dict[tuple[int, bool], Callable[[Tensor, Tensor], Tensor]] = {
    (1, False): MatrixProduct(lambda grad, other: (other.t(), grad)),
    (1, True): lambda grad, other: (grad.t() @ other).t(),
    (0, False): MatrixProduct(lambda grad, other: (grad, other.t())),
    (0, True): lambda grad, other: (other @ grad.t()).t(),
}
"""By the side of the weight in the product, and whether its columns are contiguous; the gradient's are alike."""
