"""
Foreign matrix products with a weight, whose gradient waits as it does for operations of ours.

`nn.Linear` and `x @ weight` leave a node `mm` or `addmm` in the graph, which leads to the weight or to its transpose.
The weight's gradient needs that of the product and the other factor, and no more. A hook on the node captures the
former, after all other hooks have seen it. Autograd goes through a transpose, and the hooks on it, with the weights.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from drawloom.kernels.deferred_grads import Deferral, DeferredGrad

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


AT_ONCE = 2**22
"""Bytes of gradients that may exist before they are added, 4 MiB: more cost memory, fewer cost nodes (20 us each)."""


def accumulate_grads(deferred: Sequence[DeferredGrad]) -> None:
    """
    Compute the gradients that wait, and add each to its weight's `.grad`.

    Autograd takes a gradient over as a weight's `.grad` without a copy only if nobody else holds it. So it is computed
    within a node of the graph, one for each share of the weights, and not beforehand.
    """
    # Autograd starts at the root that was made last; what the pass for the inputs found last is still in the caches.
    roots = [_weight_grads(share) for share in reversed(_shares(deferred))]
    if roots:
        torch.autograd.backward(roots, [root.detach() for root in roots])  # the gradient of a root does not matter


def _shares(deferred: Sequence[DeferredGrad]) -> list[list[DeferredGrad]]:
    """Consecutive weights whose gradients take `AT_ONCE` bytes, or one weight if that takes more."""
    shares: list[list[DeferredGrad]] = []
    room = 0
    for each in deferred:
        if room <= 0:
            shares.append([])
            room = AT_ONCE
        shares[-1].append(each)
        room -= each.weight.nbytes
    return shares


def _weight_grads(deferred: list[DeferredGrad]) -> Tensor:
    return _WeightGrads.apply(deferred, *[each.weight for each in deferred])  # type: ignore[no-untyped-call, no-any-return]


class _WeightGrads(Function):
    """Its output is on the weights' device, and so their gradients are computed in the stream that is current there."""

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
"""By the type of a node, what its two factors are saved as; the last two edges lead to them."""


@attrs.define(eq=False)
class Product:
    """A node that multiplies a weight, or its transpose, and another factor."""

    node: Node
    weight: Tensor
    other: Tensor
    gradient: Callable[[Tensor, Tensor], Tensor]

    def capture(self, deferred: DeferredGrad) -> RemovableHandle:
        """Let the weight's gradient wait, once that of the product is there; gives the hook that does it."""

        def captured(_: object, grads: tuple[Tensor | None, ...]) -> None:
            if grads[0] is not None:
                deferred.queue(self.gradient, grads[0], self.other)

        return self.node.register_hook(captured)


def defer_products(users: Users, deferral: Deferral) -> tuple[list[Tensor], list[RemovableHandle]]:
    """Let each leaf wait that such products alone use; gives the other leaves, and the hooks to remove afterwards."""
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
"""What may be a product: a look at the first user of a leaf saves the time for most."""


def _capture(products: list[Product], deferral: Deferral) -> list[RemovableHandle]:
    """Hooks on all products; none if others have hooks there, which may change the gradient of the weight."""
    handles = [product.capture(deferral.grad_for(product.weight)) for product in products]
    if all([*(handle.hooks_dict_ref() or ())] == [handle.id] for handle in handles):
        return handles
    for handle in handles:
        handle.remove()
    return []


def _products(leaf: Node, users: Users) -> list[Product]:
    """The products that use a leaf or its transpose, if nothing else does."""
    products: list[Product] = []
    for user in users[leaf]:
        factor, nodes = (user, users[user]) if type(user) is TRANSPOSE else (leaf, [user])
        for node in nodes:
            product = product_of(node, factor, users)
            if product is None or leaf.variable._backward_hooks:  # type: ignore[attr-defined]
                return []  # a hook may wait for activations too: torch raises if it is asked for this gradient
            products.append(product)
    return products


def product_of(node: Node | None, factor: Node, users: Users) -> Product | None:
    """The product with a factor that is a weight, if a node is one and all that the gradient needs is at hand."""
    if node is None or (names := FACTORS.get(type(node))) is None:
        return None
    factors = [child for child, _ in node.next_functions][-2:]
    if factor not in factors or getattr(node, "_saved_alpha", 1) != 1:
        return None
    side = factors.index(factor)
    if not _leads_on(factors[1 - side], users):
        return None
    if getattr(node, f"_raw_saved_{names[1 - side]}").unpack_hook is not None:
        return None  # it is recomputed or fetched from elsewhere, which the node itself will do, and but once
    weight, other = getattr(node, f"_saved_{names[side]}"), getattr(node, f"_saved_{names[1 - side]}")
    if other.is_complex() or other.layout != weight.layout:
        return None
    by_columns = weight.stride() == (1, len(weight))
    return Product(node, weight, other.detach(), _GRADIENTS[side, by_columns])


def _leads_on(node: Node | None, users: Users) -> bool:
    """Whether autograd goes through a product for the other factor's sake, if it is not asked for the weight's."""
    return node is not None and not (type(node) in (LEAF, TRANSPOSE) and node in users)


_GRADIENTS: dict[tuple[int, bool], Callable[[Tensor, Tensor], Tensor]] = {
    (1, False): lambda grad, other: other.t() @ grad,
    (1, True): lambda grad, other: (grad.t() @ other).t(),
    (0, False): lambda grad, other: grad @ other.t(),
    (0, True): lambda grad, other: (other @ grad.t()).t(),
}
"""By the side on which the weight stands, and whether its columns are contiguous: its gradient's are then, too."""
