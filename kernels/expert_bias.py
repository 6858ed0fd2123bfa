"""
Expert biases, added to rows sorted by expert.

As for `grouped_gemm`, only the device knows where an expert's rows end (`offsets`). Rows past the last offset may hold
any values; they are copied, and reach neither the bias's nor the scale's gradient.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from drawloom.kernels.deferred_grads import (
    WeightGradient,
    compute_at_once_if_hooked,
    get_weight_gradient_function,
)
from drawloom.kernels.operation import once_differentiable, upcast


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
