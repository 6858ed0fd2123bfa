"""
Grouped GEMM: rows sorted by expert, times their expert's matrix.

Only the device knows where an expert's rows end (`offsets`). Rows past the last offset may hold any values, in inputs
and results; they contribute to no gradient.

Expert biases, added to rows sorted by expert.

As for `grouped_gemm`, only the device knows where an expert's rows end (`offsets`). Rows past the last offset may hold
any values; they are copied, and reach neither the bias's nor the scale's gradient.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from drawloom.kernels.deferred_grads import WeightGradient, compute_at_once_if_hooked, get_weight_gradient_function
from drawloom.kernels.operation import once_differentiable, register_costs, register_operator, upcast

ALIGNMENT = 16
"""Bytes at whose multiples the rows of matrices must begin for torch.nn.functional.grouped_mm."""


class GroupedGemm(NamedTuple):
    """
    Grouped product by an implementation's two products, with `offsets` int32 (experts,).

    `rows` computes the result and the inputs' gradient: it multiplies every row in (rows, inputs) by its expert's
    matrix in (experts, inputs, outputs) and returns (rows, outputs). `matrices` computes the weights' gradient: a.T @ b
    over every expert's rows in a (rows, inputs) and b (rows, outputs), as (experts, inputs, outputs), zero for an
    expert without rows.
    """

    rows: Callable[[Tensor, Tensor, Tensor], Tensor]
    matrices: Callable[[Tensor, Tensor, Tensor], Tensor]

    def __call__(self, x: Tensor, weight: Tensor, offsets: Tensor, transposed: bool = False) -> Tensor:
        """
        Multiply x (rows, inputs) by weight (experts, inputs, outputs), or (experts, outputs, inputs) if `transposed`.

        offsets int32 (experts,): expert e has rows offsets[e - 1] to offsets[e], and expert 0 begins at row 0. Returns
        (rows, outputs) in x's dtype.
        """
        weight_gradient = get_weight_gradient_function(weight)
        result: Tensor = _GroupedGemm.apply(x, weight, offsets, transposed, self, weight_gradient)  # type: ignore[no-untyped-call]
        return result


@compute_at_once_if_hooked
class _GroupedGemm(Function):
    """Grouped product, which can defer its weight's gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        offsets: Tensor,
        transposed: bool,
        implementation: GroupedGemm,
        weight_gradient: WeightGradient,
    ) -> Tensor:
        """Return (rows, outputs) in x's dtype, for x (rows, inputs) and weight (experts, inputs, outputs)."""
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


def _weight_gradient(implementation: GroupedGemm, transposed: bool, x: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    return implementation.matrices(grad, x, offsets) if transposed else implementation.matrices(x, grad, offsets)


def count_row_product_flops(x: Tensor, weight: Tensor) -> float:
    """Return the FLOPs for x (rows, inputs), every row times a matrix in weight (experts, inputs, outputs)."""
    return 2.0 * x.numel() * weight.shape[-1]


def count_outer_product_flops(a: Tensor, b: Tensor) -> float:
    """Return the FLOPs for a.T @ b by expert: a (rows, inputs), b (rows, outputs)."""
    return 2.0 * a.numel() * b.shape[-1]


@register_operator(
    "grouped_gemm_rows_eager",
    lambda x, weight: x.new_empty(len(x), weight.shape[2]),
    is_opaque=True,
    flops=count_row_product_flops,
)
def _multiply_rows_by_expert(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    # An operator, because neither torch.compile nor the meta device can slice by values of `offsets`. Counters of
    # operations see it as one operation.
    result = x.new_zeros(len(x), weight.shape[2])
    for matrix, rows in zip(weight, list_expert_slices(offsets), strict=True):
        result[rows] = x[rows] @ matrix
    return result


@register_operator(
    "grouped_gemm_matrices_eager",
    lambda a, b, offsets: a.new_empty(len(offsets), a.shape[1], b.shape[1]),
    is_opaque=True,
    flops=count_outer_product_flops,
)
def _sum_outer_products_by_expert(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    return torch.stack([a[rows].T @ b[rows] for rows in list_expert_slices(offsets)])


def list_expert_slices(offsets: Tensor) -> list[slice]:
    """Return every expert's row range, after waiting for the device."""
    bounds: list[int] = [0, *offsets.tolist()]
    return [slice(first, last) for first, last in pairwise(bounds)]


def _multiply_rows_by_torch(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    if not x.numel() or not weight.numel():
        return x.new_zeros(len(x), weight.shape[2])
    padded = _pad_last_dim_to_alignment(weight, 2)
    product = F.grouped_mm(
        _pad_last_dim_to_alignment(x, 1),
        _pad_last_dim_to_alignment(padded.transpose(1, 2), 2).transpose(1, 2),
        offs=offsets,
    )
    return product[:, : weight.shape[2]]


def _sum_outer_products_by_torch(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    if not len(a):
        return a.new_zeros(len(offsets), a.shape[1], b.shape[1])
    product = F.grouped_mm(_pad_last_dim_to_alignment(a, 1).T, _pad_last_dim_to_alignment(b, 1), offs=offsets)
    return product[:, : a.shape[1], : b.shape[1]]


def _pad_last_dim_to_alignment(x: Tensor, size_dim: int) -> Tensor:
    """Append zeros to the last dimension of x, so that the size of `size_dim` is divisible by ALIGNMENT bytes."""
    multiple = ALIGNMENT // x.element_size()
    return F.pad(x, (0, -x.shape[size_dim] % multiple)) if x.shape[size_dim] % multiple else x


# torch 2.11 does not count it. The count is the same for rows times matrices (3 dimensions) and for sums of products of
# rows (2 dimensions).
register_costs(torch.ops.aten._grouped_mm, flops=lambda self, mat2: 2.0 * self.numel() * mat2.shape[-1])

grouped_gemm_eager = GroupedGemm(_multiply_rows_by_expert, _sum_outer_products_by_expert)
"""Grouped product that computes one product per expert, and synchronizes with the device."""

grouped_gemm_torch = GroupedGemm(_multiply_rows_by_torch, _sum_outer_products_by_torch)
"""Grouped product by torch.nn.functional.grouped_mm, without synchronizing; on GPUs for bfloat16."""


class ExpertBias(NamedTuple):
    """
    Addition of biases by an implementation's three functions, with `offsets` int32 (experts,), and scale (rows,) or
    None.

    `add` takes rows (rows, width) and bias (experts, width), and returns (rows, width). `sum_by_expert` takes gradients
    (rows, width), and returns their scaled sums (experts, width), zeros for an expert without rows. `sum_products`
    takes gradients and bias, and returns each row's product with its expert's bias, (rows,), zeros for unused rows.
    """

    add: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
    sum_by_expert: Callable[..., Tensor]
    sum_products: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

    def __call__(self, rows: Tensor, bias: Tensor, offsets: Tensor, scale: Tensor | None = None) -> Tensor:
        """
        Return rows (rows, width) plus their expert's bias (experts, width); the bias is multiplied by scale (rows,).

        offsets int32 (experts,): expert e has rows offsets[e - 1] to offsets[e], and expert 0 begins at row 0. Computed
        in at least float32 and rounded once to the rows' dtype.
        """
        result: Tensor = _AddExpertBias.apply(rows, bias, offsets, scale, self, get_weight_gradient_function(bias))  # type: ignore[no-untyped-call]
        return result


@compute_at_once_if_hooked
class _AddExpertBias(Function):
    """Bias addition by expert, which can defer the bias's gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        bias: Tensor,
        offsets: Tensor,
        scale: Tensor | None,
        implementation: ExpertBias,
        weight_gradient: WeightGradient,
    ) -> Tensor:
        """Return (rows, width) in the rows' dtype, for bias (experts, width)."""
        needs_scale = ctx.needs_input_grad[3]
        ctx.save_for_backward(bias if needs_scale else None, offsets, scale)
        ctx.implementation, ctx.weight_gradient = implementation, weight_gradient
        return implementation.add(rows, bias, offsets, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, Tensor | None, None, None]:
        bias, offsets, scale = ctx.saved_tensors
        grad = grad.contiguous()
        grad_bias = grad_scale = None
        if ctx.needs_input_grad[1]:
            factors = () if scale is None else (scale.detach(),)
            grad_bias = ctx.weight_gradient(ctx.implementation.sum_by_expert, grad, offsets, *factors)
        if bias is not None:
            grad_scale = ctx.implementation.sum_products(grad, bias, offsets, scale)
        return grad, grad_bias, None, grad_scale, None, None


def _find_experts_and_used_rows(count: int, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Return every row's expert, int64 (rows,), and whether the row is used, (rows, 1)."""
    row = torch.arange(count, device=offsets.device)
    expert = torch.searchsorted(offsets.to(row.dtype), row, right=True).clamp_(max=len(offsets) - 1)
    return expert, (row < offsets[-1]).unsqueeze(-1)


def _add_bias_by_expert(rows: Tensor, bias: Tensor, offsets: Tensor, scale: Tensor | None) -> Tensor:
    expert, is_used = _find_experts_and_used_rows(len(rows), offsets)
    added = upcast(bias)[expert]
    if scale is not None:
        added = added * scale.unsqueeze(-1)
    return (upcast(rows) + torch.where(is_used, added, 0)).to(rows.dtype)


def _sum_rows_by_expert(grad: Tensor, offsets: Tensor, scale: Tensor | None = None) -> Tensor:
    expert, is_used = _find_experts_and_used_rows(len(grad), offsets)
    wide = torch.where(is_used, upcast(grad) if scale is None else upcast(grad) * scale.unsqueeze(-1), 0)
    # Its order of additions is fixed, on a GPU, too.
    summed: Tensor = torch.ops.aten.embedding_dense_backward(wide, expert, len(offsets), -1, False)
    return summed.to(grad.dtype)


def _sum_bias_products_by_row(grad: Tensor, bias: Tensor, offsets: Tensor, scale: Tensor) -> Tensor:
    expert, is_used = _find_experts_and_used_rows(len(grad), offsets)
    return torch.where(is_used, upcast(grad) * upcast(bias)[expert], 0).sum(-1).to(scale.dtype)


add_expert_bias_eager = ExpertBias(_add_bias_by_expert, _sum_rows_by_expert, _sum_bias_products_by_row)
