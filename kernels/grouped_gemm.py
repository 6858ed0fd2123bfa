"""
Grouped GEMM: rows sorted by expert, each times its own expert's matrix.

Where the experts' rows end (`offsets`) is known to the device alone. Rows past the last offset may hold anything, in
inputs and results; they contribute to no gradient.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from drawloom.kernels.costs import no_scratch, register_costs
from drawloom.kernels.deferred_grads import WeightGradient, deferring, weight_gradient_of
from drawloom.kernels.operation import once_differentiable

ALIGNMENT = 16
"""Bytes: torch.nn.functional.grouped_mm takes matrices whose rows begin at multiples of it."""


class GroupedGemmImplementation(NamedTuple):
    """
    The two products, with `offsets` int32 (experts,).

    `rows`, for the result and the inputs' gradient: (rows, inputs) and (experts, inputs, outputs) to (rows, outputs),
    each row times its expert's matrix. `matrices`, for the weights' gradient: (rows, inputs) and (rows, outputs) to
    (experts, inputs, outputs), a.T @ b over each expert's rows, zero for an expert without rows.
    """

    rows: Callable[[Tensor, Tensor, Tensor], Tensor]
    matrices: Callable[[Tensor, Tensor, Tensor], Tensor]


def grouped_gemm_eager(x: Tensor, weight: Tensor, offsets: Tensor, transposed: bool = False) -> Tensor:
    """
    x (rows, inputs) times weight (experts, inputs, outputs), or (experts, outputs, inputs) if `transposed`.

    offsets int32 (experts,): expert e has rows offsets[e - 1] to offsets[e], the first from 0. Returns (rows, outputs)
    in the dtype of x. Synchronizes with the device: the rows of each expert are a product of their own.
    """
    return grouped_gemm(EAGER, x, weight, offsets, transposed)


def grouped_gemm_torch(x: Tensor, weight: Tensor, offsets: Tensor, transposed: bool = False) -> Tensor:
    """
    The same as grouped_gemm_eager by torch's grouped product, without synchronizing; on GPUs for bfloat16.

    x (rows, inputs), weight (experts, inputs, outputs) or transposed, offsets int32 (experts,); gives (rows, outputs).
    """
    return grouped_gemm(TORCH, x, weight, offsets, transposed)


def grouped_gemm(
    implementation: GroupedGemmImplementation, x: Tensor, weight: Tensor, offsets: Tensor, transposed: bool
) -> Tensor:
    """
    The same as grouped_gemm_eager by any implementation.

    x (rows, inputs), weight (experts, inputs, outputs) or transposed, offsets int32 (experts,); gives (rows, outputs).
    """
    weight_gradient = weight_gradient_of(weight)
    result: Tensor = _GroupedGemm.apply(x, weight, offsets, transposed, implementation, weight_gradient)  # type: ignore[no-untyped-call]
    return result


@deferring
class _GroupedGemm(Function):
    """Computes the gradients that are needed; the weight's can be deferred."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        offsets: Tensor,
        transposed: bool,
        implementation: GroupedGemmImplementation,
        weight_gradient: WeightGradient,
    ) -> Tensor:
        """x (rows, inputs), weight (experts, inputs, outputs) or transposed: (rows, outputs) in the dtype of x."""
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None, offsets)
        ctx.transposed, ctx.implementation, ctx.weight_gradient = transposed, implementation, weight_gradient
        return implementation.rows(x, weight.transpose(1, 2) if transposed else weight, offsets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        x, weight, offsets = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = grad_weight = None
        if weight is not None:
            grad_x = ctx.implementation.rows(grad, weight if ctx.transposed else weight.transpose(1, 2), offsets)
        if x is not None:
            compute = partial(_weight_gradient, ctx.implementation, ctx.transposed)
            grad_weight = ctx.weight_gradient(compute, x, grad, offsets)
        return grad_x, grad_weight, None, None, None, None


def _weight_gradient(
    implementation: GroupedGemmImplementation, transposed: bool, x: Tensor, grad: Tensor, offsets: Tensor
) -> Tensor:
    return implementation.matrices(grad, x, offsets) if transposed else implementation.matrices(x, grad, offsets)


def rows_flops(x: Tensor, weight: Tensor) -> float:
    """Return the FLOPs of x (rows, inputs), each row times a matrix of weight (experts, inputs, outputs)."""
    return 2.0 * x.numel() * weight.shape[-1]


def matrices_flops(a: Tensor, b: Tensor) -> float:
    """Return the FLOPs of a.T @ b over the rows of each expert: a (rows, inputs), b (rows, outputs)."""
    return 2.0 * a.numel() * b.shape[-1]


def _torch_flops(self: Tensor, mat2: Tensor) -> float:
    # Rows times matrices (3 dimensions), or sums of products of rows (2 dimensions): the count is the same.
    return 2.0 * self.numel() * mat2.shape[-1]


@torch.library.custom_op("drawloom::grouped_gemm_rows_eager", mutates_args=())
def _rows(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    # A custom op, because neither torch.compile nor the meta device can slice by values of `offsets`.
    result = x.new_zeros(len(x), weight.shape[2])
    for matrix, own in zip(weight, _slices(offsets), strict=True):
        result[own] = x[own] @ matrix
    return result


@_rows.register_fake
def _(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(len(x), weight.shape[2])


@torch.library.custom_op("drawloom::grouped_gemm_matrices_eager", mutates_args=())
def _matrices(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    return torch.stack([a[own].T @ b[own] for own in _slices(offsets)])


@_matrices.register_fake
def _(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    return a.new_empty(len(offsets), a.shape[1], b.shape[1])


def _slices(offsets: Tensor) -> list[slice]:
    places: list[int] = [0, *offsets.tolist()]
    return [slice(first, last) for first, last in pairwise(places)]


def _rows_by_torch(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    if not x.numel() or not weight.numel():
        return x.new_zeros(len(x), weight.shape[2])
    padded = _padded(weight, 2)
    product = F.grouped_mm(_padded(x, 1), _padded(padded.transpose(1, 2), 2).transpose(1, 2), offs=offsets)
    return product[:, : weight.shape[2]]


def _matrices_by_torch(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    if not len(a):
        return a.new_zeros(len(offsets), a.shape[1], b.shape[1])
    product = F.grouped_mm(_padded(a, 1).T, _padded(b, 1), offs=offsets)
    return product[:, : a.shape[1], : b.shape[1]]


def _padded(x: Tensor, dimension: int) -> Tensor:
    """x with zeros appended in its last dimension, so that size `dimension` becomes a multiple of ALIGNMENT bytes."""
    multiple = ALIGNMENT // x.element_size()
    return F.pad(x, (0, -x.shape[dimension] % multiple)) if x.shape[dimension] % multiple else x


register_costs(torch.ops.drawloom.grouped_gemm_rows_eager, flops=rows_flops, scratch=no_scratch)
register_costs(torch.ops.drawloom.grouped_gemm_matrices_eager, flops=matrices_flops, scratch=no_scratch)
register_costs(torch.ops.aten._grouped_mm, flops=_torch_flops, scratch=no_scratch)  # torch 2.11 does not count it

EAGER = GroupedGemmImplementation(_rows, _matrices)
TORCH = GroupedGemmImplementation(_rows_by_torch, _matrices_by_torch)
