"""
Deferral of weight gradients for torch's own products, which don't use kernels/deferred_grads.py.

`nn.Linear`, `x @ weight` and `nn.Conv2d` leave a node in the autograd graph, with an edge to the weight, to its
transpose, or to its copy by autocast. The gradients of weight and bias only need the product's gradient and the other
factor. A hook on the node captures the gradient after all other hooks have run. Transposes and casts with hooks or
several users run with the weight gradients; otherwise the leaf's gradient is computed directly, without them.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from drawloom.kernels.deferral import Deferral, record_versions
from drawloom.kernels.deferred_grads import Compute, MatrixProduct
from drawloom.kernels.recompute.saved_tensors import (
    LEAF,
    TRANSPOSE,
    KeptTensor,
    SavedTensor,
    get_wrapper_of_saved_variable,
)

Users = dict[Node | None, list[Node | None]]
"""Nodes with an edge to a node, by this node; None stands for the outputs of the graph."""


def find_node_users(outputs: Iterable[Tensor], inputs: Iterable[Tensor]) -> Users:
    """
    Return the users of all nodes between outputs and inputs (tensors of any shape), without the inputs' nodes.

    This takes about 1 us per node, for every microbatch, because the next one's graph may reach other leaves.
    """
    stops, input_leaves = [], set()
    for tensor in inputs:
        if tensor.grad_fn is None:
            input_leaves.add(id(tensor))  # the walk reaches the leaf's node anyway; asking torch for it takes 3 us
        else:
            stops.append(tensor.grad_fn)
    # get_gradient_edge alone takes microseconds.
    roots = [(output.grad_fn or get_gradient_edge(output).node, 0) for output in outputs]
    users: Users = {node: [] for node in (None, *stops)}
    nodes: list[Node | None] = [None]
    for node in nodes:  # a breadth-first search: the list grows during the loop
        for child, _ in roots if node is None else node.next_functions:
            if child in users:
                users[child].append(node)
            else:
                users[child] = [node]
                nodes.append(child)
    leaves = [node for node in nodes if type(node) is LEAF and id(node.variable) in input_leaves]  # type: ignore[attr-defined]
    for node in {None, *stops, *leaves}:
        del users[node]
    return users


@attrs.frozen
class Edges:
    """Edges from a product's node to its factors and bias, and its saved factors' names."""

    factors: tuple[int, int]
    names: tuple[str, str]
    bias: int | None = None

    def get_saved(self, node: Node, side: int) -> Tensor:
        """Return a node's saved factor (any shape)."""
        factor: Tensor = getattr(node, f"_saved_{self.names[side]}")
        return factor

    def get_saved_variable(self, node: Node, side: int) -> Any:
        """Return torch's wrapper around a saved factor."""
        return getattr(node, f"_raw_saved_{self.names[side]}")


CONVOLUTION: type[Node] = torch._C._functions.ConvolutionBackward0  # type: ignore[attr-defined]
CAST: type[Node] = torch._C._functions.ToCopyBackward0  # type: ignore[attr-defined]

EDGES: dict[type[Node], Edges] = {
    torch._C._functions.MmBackward0: Edges((0, 1), ("self", "mat2")),  # type: ignore[attr-defined]
    torch._C._functions.AddmmBackward0: Edges((1, 2), ("mat1", "mat2"), bias=0),  # type: ignore[attr-defined]
    CONVOLUTION: Edges((0, 1), ("input", "weight"), bias=2),
}

_PASSED = {TRANSPOSE, CAST}
"""Types of nodes between a weight and its product that can run with the weight's gradient."""


@attrs.define(eq=False)
class Product:
    """Node that multiplies a weight, or its transpose or cast, by another factor, and may add a bias."""

    node: Node
    weight: Tensor
    other: SavedTensor
    gradient: Compute
    bias: Tensor | None
    bias_gradient: Compute

    def register_deferring_hook(self, deferral: Deferral) -> RemovableHandle:
        """Register a hook that queues the gradients of weight and bias once the product's gradient is computed."""
        queue, gradient, other = (
            deferral.gradient_function_for(self.weight).queue_versioned_summand,
            self.gradient,
            self.other,
        )
        queue_bias = None if self.bias is None else deferral.gradient_function_for(self.bias).queue_versioned_summand
        bias_gradient = self.bias_gradient

        def queue_gradients(_: object, grads: tuple[Tensor | None, ...]) -> None:
            if (grad := grads[0]) is not None:
                factors = record_versions(grad, other.get_or_recompute())
                queue(gradient, factors)
                if queue_bias is not None:
                    queue_bias(bias_gradient, factors)

        return self.node.register_hook(queue_gradients)


def defer_and_return_other_leaves(users: Users, deferral: Deferral) -> tuple[list[Tensor], list[RemovableHandle]]:
    """
    Queue in `deferral` the weight gradients of leaves used only by products.

    Returns the other leaves (tensors of any shape), and the hooks to remove afterwards.
    """
    leaves: dict[int, Tensor] = {}
    deferred: set[int] = set()
    handles: list[RemovableHandle] = []
    # From inputs to outputs, like kernels that record themselves, and weights before their product's bias.
    for leaf, its_users in reversed(users.items()):
        if type(leaf) is LEAF:
            tensor = leaf.variable  # type: ignore[attr-defined]
            key = id(tensor)
            if key in deferred:
                continue
            # The type of a leaf's first user rules out most leaves at once.
            products = _find_products(leaf, tensor, users) if type(its_users[0]) in _CANDIDATES else []
            if products and (captured := _register_hooks_unless_others_exist(products, deferral)):
                handles += captured
                deferred.update([key, *[id(product.bias) for product in products]])
            else:
                leaves[key] = tensor
    return [tensor for key, tensor in leaves.items() if key not in deferred], handles


_CANDIDATES = {*EDGES, *_PASSED}
"""Types of nodes that may be a product or lead to a product."""


def _register_hooks_unless_others_exist(products: list[Product], deferral: Deferral) -> list[RemovableHandle]:
    """Register hooks on all products; none if a product has a foreign hook, which may change the weight's gradient."""
    handles = [product.register_deferring_hook(deferral) for product in products]
    if all(len(handle.hooks_dict_ref() or ()) == 1 for handle in handles):
        return handles
    for handle in handles:
        handle.remove()
    return []


def _find_products(leaf: Node, tensor: Tensor, users: Users) -> list[Product]:
    """Return the products that use a leaf (any shape), or its transpose or cast; none if other nodes use it."""
    if tensor._backward_hooks:
        return []  # the leaf's hook may need activations: then torch must see this gradient and raise an error
    products: list[Product] = []
    factors = [leaf]
    for factor in factors:  # the list grows during the loop
        for user in users[factor]:
            if user is not None and type(user) in _PASSED:
                factors.append(user)
            elif (product := _match_product(user, factor, tensor, users)) is not None:
                products.append(product)
            else:
                return []
    # Adding the gradients of a leaf and of its transpose or cast one after another would round differently.
    return products if len({product.weight is tensor for product in products}) == 1 else []


def _match_product(node: Any, factor: Node, leaf: Tensor, users: Users) -> Product | None:
    """Return the product of a node with `factor`, derived from a leaf (any shape); None if it can't be deferred."""
    if (edges := EDGES.get(type(node))) is None:
        return None
    children = [child for child, _ in node.next_functions]
    position = children.index(factor)
    if position not in edges.factors or children.count(factor) > 1 or getattr(node, "_saved_alpha", 1) != 1:
        return None
    side = edges.factors.index(position)
    if not _is_visited_by_backward_anyway(children[edges.factors[1 - side]], users):
        return None
    weight = leaf if type(factor) is LEAF else _get_saved_weight_with_graph(node, edges, side)
    other = _find_other_factor(node, edges, 1 - side)
    if weight is None or other is None or weight.is_complex():
        return None
    if type(other) is KeptTensor and other.get_or_recompute().layout != weight.layout:
        return None
    below = None if edges.bias is None else children[edges.bias]
    bias = None if below is None else _find_bias(node, below, users)
    if type(node) is CONVOLUTION:
        # If only the bias's gradient is requested, the node of a convolution computes the weight's gradient as well.
        if side == 0 or (below is not None and bias is None):
            return None
        gradients = ConvolutionGradients(node, weight, bias)
        return Product(node, weight, other, gradients.compute_weight_gradient, bias, gradients.compute_bias_gradient)
    sum_to_bias = partial(_sum_gradient_to_shape, () if bias is None else bias.shape)
    # A gradient with the weight's own strides is accumulated without a copy.
    by_columns = weight.stride() == (1, weight.shape[0])
    # Without saved-tensor hooks a node returns the saved tensor itself, with its hooks.
    original = edges.get_saved(node, side) is weight
    if weight is leaf or not original or not _is_only_derived_for_product(factor, weight, leaf, users):
        return Product(node, weight, other, _GRADIENTS[side, by_columns, False], bias, sum_to_bias)
    gradient = _GRADIENTS[side, by_columns, type(factor) is TRANSPOSE]
    if weight.dtype != leaf.dtype:
        gradient = partial(_compute_gradient_in_dtype, leaf.dtype, gradient)
    return Product(node, leaf, other, gradient, bias, sum_to_bias)


def _get_saved_weight_with_graph(node: Node, edges: Edges, side: int) -> Tensor | None:
    """Return saved factor `side` (0 or 1) with its autograd graph; None if hooks would recompute it."""
    variable = edges.get_saved_variable(node, side)
    if variable.unpack_hook is not None and not isinstance(get_wrapper_of_saved_variable(variable), KeptTensor):
        return None
    return edges.get_saved(node, side)


def _is_only_derived_for_product(factor: Any, derived: Tensor, leaf: Tensor, users: Users) -> bool:
    """
    Return whether only transposes and casts, without other users or hooks, derive `derived` from the leaf.

    `factor` is the node with the result `derived`. The leaf's gradient is then computed without the nodes in between.
    """
    tensor: Any = derived
    while type(factor) is not LEAF:
        if tensor is None or tensor.grad_fn is not factor or len(users[factor]) > 1:
            return False
        if tensor._backward_hooks or tensor.retains_grad:
            return False
        factor, tensor = factor.next_functions[0][0], tensor._base
    return derived.device == leaf.device


def _find_bias(node: Node, below: Node, users: Users) -> Tensor | None:
    """Return a node's bias, a leaf without other users; None if autograd must compute its gradient."""
    if type(below) is not LEAF or users.get(below) != [node] or getattr(node, "_saved_beta", 1) != 1:
        return None
    leaf: Tensor = below.variable  # type: ignore[attr-defined]
    return None if leaf._backward_hooks else leaf


def _sum_gradient_to_shape(shape: Sequence[int], grad: Tensor, _: Tensor) -> Tensor:
    """Sum a matrix product's gradient (rows, columns) to the bias's shape."""
    return grad.sum_to_size(shape)


def _compute_gradient_in_dtype(dtype: torch.dtype, gradient: Compute, *tensors: Tensor) -> Tensor:
    """Compute a gradient (any shape) and cast it."""
    return gradient(*tensors).to(dtype)


class ConvolutionGradients:
    """
    Gradients of a convolution's weight and bias (any shapes), computed together by the first call.

    Each method is called at most once, because a returned gradient is not kept.
    """

    __slots__ = ("_arguments", "_gradients", "_like")

    def __init__(self, node: Any, weight: Tensor, bias: Tensor | None) -> None:
        geometry = node._saved_stride, node._saved_padding, node._saved_dilation
        options = node._saved_transposed, node._saved_output_padding, node._saved_groups
        self._like = weight.detach()  # only its shape and strides are used
        self._arguments = None if bias is None else [*bias.shape], *geometry, *options, [False, True, bias is not None]
        self._gradients: list[Tensor] = []

    def compute_weight_gradient(self, grad: Tensor, convolution_input: Tensor) -> Tensor:
        """Return the weight's gradient, given the output's gradient and the input; call this method first."""
        return self._compute_gradients_once(grad, convolution_input).pop(0)

    def compute_bias_gradient(self, grad: Tensor, convolution_input: Tensor) -> Tensor:
        """Return the bias's gradient (channels,)."""
        return self._compute_gradients_once(grad, convolution_input).pop()

    def _compute_gradients_once(self, grad: Tensor, convolution_input: Tensor) -> list[Tensor]:
        """Return the remaining gradients (any shapes), computed by the first call."""
        if not self._gradients:
            self._gradients = [
                *torch.ops.aten.convolution_backward(grad, convolution_input, self._like, *self._arguments)[1:]
            ]
        return self._gradients


def _find_other_factor(node: Node, edges: Edges, side: int) -> SavedTensor | None:
    """Return the other factor, perhaps to be recomputed; None if foreign saved-tensor hooks keep it."""
    variable = edges.get_saved_variable(node, side)
    return (
        KeptTensor(edges.get_saved(node, side))
        if variable.unpack_hook is None
        else get_wrapper_of_saved_variable(variable)
    )


def _is_visited_by_backward_anyway(node: Node | None, users: Users) -> bool:
    """Return whether autograd visits a product anyway, because gradients flow on through its other factor."""
    while node is not None and type(node) in _PASSED and node in users:
        node = node.next_functions[0][0]
    return node is not None and not (type(node) is LEAF and node in users)


_PRODUCTS = {
    (1, False): MatrixProduct(lambda grad, other: (other.t(), grad)),
    (1, True): MatrixProduct(lambda grad, other: (grad.t(), other)),
    (0, False): MatrixProduct(lambda grad, other: (grad, other.t())),
    (0, True): MatrixProduct(lambda grad, other: (other, grad.t())),
}
"""Gradient of a weight by its side in the product; its transpose if the weight's columns are contiguous."""


def _compute_transposed_gradient(gradient: Compute, grad: Tensor, other: Tensor) -> Tensor:
    """Compute a gradient (rows, columns) and return its transpose (columns, rows)."""
    return gradient(grad, other).t()


_GRADIENTS: dict[tuple[int, bool, bool], Compute] = {
    (*key, transposed): gradient if key[1] == transposed else partial(_compute_transposed_gradient, gradient)
    for key, gradient in _PRODUCTS.items()
    for transposed in (False, True)
}
"""Gradient by side, by contiguous columns, and by whether the weight is the transpose of the leaf."""
