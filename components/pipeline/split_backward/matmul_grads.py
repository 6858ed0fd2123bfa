"""
Deferred weight gradients of torch's own products, which don't use kernels/deferred_grads.py; and accumulating them.

`nn.Linear`, `x @ weight` and `nn.Conv2d` leave a node in the autograd graph, with an edge to the weight, or to its
transpose or the copy that autocast makes of it. The gradients of weight and bias need only the gradient of the product
and the other factor. A hook on the node captures the former, after all other hooks have run. Transposes and casts, and
the hooks on them, run with the weight gradients.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from drawloom.kernels.deferred_grads import Compute, Deferral, DeferredGrad, MatrixProduct
from drawloom.kernels.recompute import LEAF, TRANSPOSE, Kept, Saved, held_by

Users = dict[Node | None, list[Node | None]]
"""By node, the nodes that have an edge to it; None stands for the outputs of the graph."""


def users_of(outputs: Iterable[Tensor], inputs: Iterable[Tensor]) -> Users:
    """
    The users of each node between outputs and inputs (tensors of any shape), without the inputs' own nodes and beyond.

    Takes about 1 us a node. It is computed for each microbatch, as the next one's graph may reach other leaves.
    """
    stops, given = [], set()
    for tensor in inputs:
        if tensor.grad_fn is None:
            given.add(id(tensor))  # the walk meets a leaf's node anyway; to ask torch for it takes 3 us
        else:
            stops.append(tensor.grad_fn)
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
    leaves = [node for node in nodes if type(node) is LEAF and _id_of(node) in given]
    for node in {None, *stops, *leaves}:
        del users[node]
    return users


def _id_of(leaf: Any) -> int:
    """The id of the tensor whose gradient a node adds up."""
    return id(leaf.variable)


def _node_of(tensor: Tensor) -> Node:
    """The node that made a tensor (any shape), or that adds up the gradient of a leaf."""
    # torch finds the first, too, but takes microseconds.
    return tensor.grad_fn or get_gradient_edge(tensor).node


CHUNK_BYTES = 2**22
"""Bytes of gradients that are computed before they are accumulated: more cost memory, fewer cost nodes (20 us each)."""


class WeightGrads:
    """
    Computes deferred gradients and adds each to its weight's `.grad`.

    Autograd makes a gradient a weight's `.grad` without a copy only if it holds the only reference. So gradients are
    computed within a node of the graph, one for each chunk of weights, and not beforehand. To make one takes
    microseconds: microbatches that share an instance share the nodes.
    """

    __slots__ = ("_nodes",)

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, ...], _Root] = {}

    def add(self, deferred: Sequence[DeferredGrad]) -> None:
        """Accumulate the deferred gradients of weights (any shapes), whose hooks are called once."""
        # Autograd starts at the root created last, so the gradients deferred last come first: their tensors are still
        # in the caches.
        nodes = [self._node(chunk) for chunk in reversed(_chunks(deferred))]
        try:
            if nodes:
                roots, grads = zip(*((node.root, node.grad) for node in nodes), strict=True)
                torch.autograd.backward(roots, grads, retain_graph=True)
        finally:
            for node in nodes:
                node.deferred.clear()

    def _node(self, chunk: list[DeferredGrad]) -> "_Root":
        """A node for weights that are about to be computed."""
        weights = [each.weight for each in chunk]
        key = tuple(map(id, weights))
        if (node := self._nodes.get(key)) is None:
            node = _Root(weights)
            # The node holds leaves, so that nothing else gets their ids; a view of one is of one microbatch alone.
            if all(weight.is_leaf for weight in weights):
                self._nodes[key] = node
        node.deferred[:] = chunk
        return node


class _Root:
    """A root whose backward pass computes what is `deferred` for some weights, and any gradient of it."""

    __slots__ = ("deferred", "grad", "root")

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.deferred: list[DeferredGrad] = []
        self.root: Tensor = _Computing.apply(self.deferred, *weights)  # type: ignore[no-untyped-call]
        self.grad = self.root.detach()  # _Computing ignores its output's gradient


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


class _Computing(Function):
    """A node whose backward pass computes deferred weight gradients."""

    # Its output is on the weights' device, so autograd runs the backward in the stream that is current there.

    @staticmethod
    def forward(ctx: Any, deferred: list[DeferredGrad], *weights: Tensor) -> Tensor:
        """A tensor without dimensions or a value, on the device of the weights, which may have any shape."""
        ctx.deferred = deferred
        return weights[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *[each.compute() for each in ctx.deferred]


@attrs.frozen
class Edges:
    """Which edges of a node that multiplies lead to its factors and a bias, and the names that it saves factors by."""

    factors: tuple[int, int]
    names: tuple[str, str]
    bias: int | None = None


CONVOLUTION: type[Node] = torch._C._functions.ConvolutionBackward0  # type: ignore[attr-defined]
CAST: type[Node] = torch._C._functions.ToCopyBackward0  # type: ignore[attr-defined]

EDGES: dict[type[Node], Edges] = {
    torch._C._functions.MmBackward0: Edges((0, 1), ("self", "mat2")),  # type: ignore[attr-defined]
    torch._C._functions.AddmmBackward0: Edges((1, 2), ("mat1", "mat2"), bias=0),  # type: ignore[attr-defined]
    CONVOLUTION: Edges((0, 1), ("input", "weight"), bias=2),
}

_PASSED = {TRANSPOSE, CAST}
"""Types of nodes between a weight and its product, which run with the weight's gradient."""


@attrs.define(eq=False)
class Product:
    """A node that multiplies a weight, or what nodes that are passed make of it, by another factor; and a bias."""

    node: Node
    weight: Tensor
    other: Saved
    gradient: Compute
    bias: Tensor | None

    def capture(self, deferral: Deferral) -> RemovableHandle:
        """Register a hook that queues the gradients of weight and bias when that of the product is computed."""
        of_weight, gradient, other = deferral.grad_for(self.weight), self.gradient, self.other
        of_bias = None if self.bias is None else deferral.grad_for(self.bias)
        summed = None if self.bias is None else bias_gradient(self.node, self.bias)

        def captured(_: object, grads: tuple[Tensor | None, ...]) -> None:
            if grads[0] is not None:
                of_weight.queue(gradient, grads[0], other.value())
                if of_bias is not None and summed is not None:
                    of_bias.queue(summed, grads[0])

        return self.node.register_hook(captured)


def defer_products(users: Users, deferral: Deferral) -> tuple[list[Tensor], list[RemovableHandle]]:
    """
    Defer the gradients of leaves that only products use.

    Returns the other leaves (tensors of any shape), and the hooks to remove afterwards.
    """
    leaves: dict[int, Tensor] = {}
    taken: set[int] = set()
    handles: list[RemovableHandle] = []
    for leaf, its_users in users.items():
        if type(leaf) is LEAF:
            tensor = leaf.variable  # type: ignore[attr-defined]
            leaves[id(tensor)] = tensor
            products = _products(leaf, users) if type(its_users[0]) in _CANDIDATES else []
            if captured := _capture(products, deferral):
                handles += captured
                taken |= {id(tensor), *(id(product.bias) for product in products)}
    return [tensor for key, tensor in leaves.items() if key not in taken], handles


_CANDIDATES = {*EDGES, *_PASSED}
"""Types of nodes that may be a product: the type of a leaf's first user rules out most leaves at once."""


def _capture(products: list[Product], deferral: Deferral) -> list[RemovableHandle]:
    """Register hooks on all products; none if any has a foreign hook, which may change the weight's gradient."""
    handles = [product.capture(deferral) for product in products]
    if all([*(handle.hooks_dict_ref() or ())] == [handle.id] for handle in handles):
        return handles
    for handle in handles:
        handle.remove()
    return []


def _products(leaf: Node, users: Users) -> list[Product]:
    """The products that use a leaf, its transpose or a cast of it; none if anything else uses it."""
    if leaf.variable._backward_hooks:  # type: ignore[attr-defined]
        return []  # the leaf's hook may need activations: then torch must see this gradient and raise an error
    products: list[Product] = []
    factors = [leaf]
    for factor in factors:  # the list grows during the loop
        for user in users[factor]:
            if user is not None and type(user) in _PASSED:
                factors.append(user)
            elif (product := product_of(user, factor, users)) is not None:
                products.append(product)
            else:
                return []
    return products


def product_of(node: Node | None, factor: Node, users: Users) -> Product | None:
    """The product of a node with `factor`, a weight; None if it is another node, or can't be deferred."""
    if node is None or (edges := EDGES.get(type(node))) is None:
        return None
    children = [child for child, _ in node.next_functions]
    if children.count(factor) != 1 or children.index(factor) not in edges.factors:
        return None
    side = edges.factors.index(children.index(factor))
    if getattr(node, "_saved_alpha", 1) != 1 or not _leads_on(children[edges.factors[1 - side]], users):
        return None
    weight, other = _weight_of(node, factor, edges.names[side]), _other_of(node, edges.names[1 - side])
    if weight is None or other is None or weight.is_complex():
        return None
    if isinstance(other, Kept) and other.value().layout != weight.layout:
        return None
    below = None if edges.bias is None else children[edges.bias]
    bias = None if below is None else _bias_of(node, below, users)
    if type(node) is not CONVOLUTION:
        # A gradient with the weight's own strides is accumulated without a copy.
        by_columns = weight.stride() == (1, len(weight))
        return Product(node, weight, other, _GRADIENTS[side, by_columns], bias)
    # Asked for the bias's gradient alone, the node of a convolution computes the weight's as well.
    if side == 0 or (below is not None and bias is None):
        return None
    return Product(node, weight, other, convolution_gradient(node, weight), bias)


def _bias_of(node: Node, below: Node, users: Users) -> Tensor | None:
    """The bias of a node, a leaf that it alone uses; None if its gradient is left to autograd."""
    if type(below) is not LEAF or users.get(below) != [node] or getattr(node, "_saved_beta", 1) != 1:
        return None
    leaf: Tensor = below.variable  # type: ignore[attr-defined]
    return None if leaf._backward_hooks else leaf


def bias_gradient(node: Node, bias: Tensor) -> Compute:
    """What computes the gradient of a bias of any shape from that of a product."""
    if type(node) is CONVOLUTION:
        return _summed_over_places
    return partial(Tensor.sum_to_size, size=bias.shape)


def _summed_over_places(grad: Tensor) -> Tensor:
    """The gradient (channels,) of the bias of a convolution, of that of its output (rows, channels, ...)."""
    return grad.sum([0, *range(2, grad.ndim)])


def convolution_gradient(node: Any, weight: Tensor) -> Compute:
    """What computes the gradient of a convolution's weight, of any shape, from those of output and input."""
    where = node._saved_stride, node._saved_padding, node._saved_dilation
    how = node._saved_transposed, node._saved_output_padding, node._saved_groups
    like = weight.detach()  # its shape and strides count, and not its values

    def gradient(grad: Tensor, x: Tensor) -> Tensor:
        asked = [False, True, False]
        found: Tensor = torch.ops.aten.convolution_backward(grad, x, like, None, *where, *how, asked)[1]
        return found

    return gradient


def _weight_of(node: Node, factor: Node, name: str) -> Tensor | None:
    """The weight or what was made of it, with its graph; None if that would have to be recomputed."""
    if type(factor) is LEAF:
        leaf: Tensor = factor.variable  # type: ignore[attr-defined]
        return leaf
    variable = getattr(node, f"_raw_saved_{name}")
    if variable.unpack_hook is not None and not isinstance(held_by(variable), Kept):
        return None
    made: Tensor = getattr(node, f"_saved_{name}")
    return made


def _other_of(node: Node, name: str) -> Saved | None:
    """The other factor, which may be recomputed; None if hooks hold it that may give it to the node alone."""
    variable = getattr(node, f"_raw_saved_{name}")
    return Kept(getattr(node, f"_saved_{name}")) if variable.unpack_hook is None else held_by(variable)


def _leads_on(node: Node | None, users: Users) -> bool:
    """Whether autograd runs a product's backward for its other factor alone, without a request for the weight's."""
    while node is not None and type(node) in _PASSED and node in users:
        node = node.next_functions[0][0]
    return node is not None and not (type(node) is LEAF and node in users)


_GRADIENTS: dict[tuple[int, bool], Callable[[Tensor, Tensor], Tensor]] = {
    (1, False): MatrixProduct(lambda grad, other: (other.t(), grad)),
    (1, True): lambda grad, other: (grad.t() @ other).t(),
    (0, False): MatrixProduct(lambda grad, other: (grad, other.t())),
    (0, True): lambda grad, other: (other @ grad.t()).t(),
}
"""By the side of the weight in the product, and whether its columns are contiguous; the gradient's are alike."""
