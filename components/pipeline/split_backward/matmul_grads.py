"""
Foreign matrix products with a weight, whose gradient waits as it does for operations of ours.

`nn.Linear` and `x @ weight` leave a node `mm` or `addmm` in the graph, which leads to the weight or to its transpose.
The weight's gradient needs that of the product and the other factor, and no more. A hook on the node captures the
former, after all other hooks have seen it. Autograd goes through a transpose, and the hooks on it, with the weights.
"""

from collections.abc import Callable

import attrs
import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from drawloom.components.pipeline.split_backward.autograd_graph import LEAF, TRANSPOSE, Users
from drawloom.kernels.deferred_grads import Deferral, DeferredGrad

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

    def capture(self, put_off: DeferredGrad) -> RemovableHandle:
        """Let the weight's gradient wait, once that of the product is there; gives the hook that does it."""

        def captured(_: object, grads: tuple[Tensor | None, ...]) -> None:
            if grads[0] is not None:
                put_off.wait(self.gradient, grads[0], self.other)

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
    handles = [product.capture(deferral.of(product.weight)) for product in products]
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
