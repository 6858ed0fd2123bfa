"""
One matrix for each expert: rows that are sorted by expert, each times the matrix of its own.

Where the experts' rows end is known to the device alone. Rows past the last end may hold anything, before and after;
they reach nobody.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from drawloom.kernels.deferred_grads import WeightGradient, deferring, weight_gradient_of

ALIGNMENT = 16
"""torch's grouped product takes matrices whose rows begin at multiples of so many bytes."""


class Implementation(NamedTuple):
    """
    The two products, with `ends` int32 (experts,).

    `rows` of (rows, inputs) and (experts, inputs, outputs) is (rows, outputs): each row times its expert's matrix.
    `matrices` of (rows, inputs) and (rows, outputs) is (experts, inputs, outputs): a.T @ b over each expert's rows,
    zero for one that has none.
    """

    rows: Callable[[Tensor, Tensor, Tensor], Tensor]
    matrices: Callable[[Tensor, Tensor, Tensor], Tensor]


def grouped_gemm_eager(x: Tensor, weight: Tensor, ends: Tensor, transposed: bool = False) -> Tensor:
    """
    x (rows, inputs) times weight (experts, inputs, outputs), or, transposed, (experts, outputs, inputs).

    Expert e has the rows up to ends[e], int32, that no expert before it has. Gives (rows, outputs). Waits for the
    device, for the rows of each expert are a product of their own.
    """
    return grouped_gemm(EAGER, x, weight, ends, transposed)


def grouped_gemm_torch(x: Tensor, weight: Tensor, ends: Tensor, transposed: bool = False) -> Tensor:
    """The same by torch's grouped product, which waits for nothing; on GPUs, for bfloat16."""
    return grouped_gemm(TORCH, x, weight, ends, transposed)


def grouped_gemm(implementation: Implementation, x: Tensor, weight: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    """The same by any implementation."""
    later = weight_gradient_of(weight)
    result: Tensor = _GroupedGemm.apply(x, weight, ends, transposed, implementation, later)  # type: ignore[no-untyped-call]
    return result


@deferring
class _GroupedGemm(Function):
    """Each gradient is computed if it is asked for; the weight's can be put off."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        ends: Tensor,
        transposed: bool,
        implementation: Implementation,
        weight_gradient: WeightGradient,
    ) -> Tensor:
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None, ends)
        ctx.transposed, ctx.implementation, ctx.weight_gradient = transposed, implementation, weight_gradient
        return implementation.rows(x, weight.transpose(1, 2) if transposed else weight, ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        x, weight, ends = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = grad_weight = None
        if weight is not None:
            grad_x = ctx.implementation.rows(grad, weight if ctx.transposed else weight.transpose(1, 2), ends)
        if x is not None:
            compute = partial(_weight_gradient, ctx.implementation, ctx.transposed)
            grad_weight = ctx.weight_gradient(compute, x, grad, ends)
        return grad_x, grad_weight, None, None, None, None


def _weight_gradient(implementation: Implementation, transposed: bool, x: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    return implementation.matrices(grad, x, ends) if transposed else implementation.matrices(x, grad, ends)


@torch.library.custom_op("drawloom::grouped_gemm_rows_eager", mutates_args=())
def _rows(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """An operation of torch: neither compilers nor the meta device can do what depends on the numbers in `ends`."""
    result = x.new_zeros(len(x), weight.shape[2])
    for matrix, own in zip(weight, _slices(ends), strict=True):
        result[own] = x[own] @ matrix
    return result


@_rows.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(len(x), weight.shape[2])


@torch.library.custom_op("drawloom::grouped_gemm_matrices_eager", mutates_args=())
def _matrices(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    return torch.stack([a[own].T @ b[own] for own in _slices(ends)])


@_matrices.register_fake
def _(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    return a.new_empty(len(ends), a.shape[1], b.shape[1])


def _slices(ends: Tensor) -> list[slice]:
    places: list[int] = [0, *ends.tolist()]
    return [slice(first, last) for first, last in pairwise(places)]


def _rows_by_torch(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    if not x.numel() or not weight.numel():
        return x.new_zeros(len(x), weight.shape[2])
    padded = _padded(weight, 2)
    product = F.grouped_mm(_padded(x, 1), _padded(padded.transpose(1, 2), 2).transpose(1, 2), offs=ends)
    return product[:, : weight.shape[2]]


def _matrices_by_torch(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    if not len(a):
        return a.new_zeros(len(ends), a.shape[1], b.shape[1])
    product = F.grouped_mm(_padded(a, 1).T, _padded(b, 1), offs=ends)
    return product[:, : a.shape[1], : b.shape[1]]


def _padded(x: Tensor, dimension: int) -> Tensor:
    """With zeros to the next multiple of what torch's product takes, in the last dimension."""
    multiple = ALIGNMENT // x.element_size()
    return F.pad(x, (0, -x.shape[dimension] % multiple)) if x.shape[dimension] % multiple else x


EAGER = Implementation(_rows, _matrices)
TORCH = Implementation(_rows_by_torch, _matrices_by_torch)
