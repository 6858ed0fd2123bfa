"""
Attention by a kernel with statistics, and exact gradients for attention sinks.

A sink is a score for one more key, whose value is 0 (Xiao et al. 2023, "Efficient Streaming Language Models with
Attention Sinks", arXiv 2309.17453). It multiplies the result by sigmoid(lse - sink), where lse is the scores'
log-sum-exp, and changes lse to logaddexp(lse, sink). A backward pass with the new result and the new lse computes the
gradients with the sink: it needs only the weights exp(score - lse), and the product of the result with its gradient.
"""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from drawloom.kernels.operation import once_differentiable


class SoftmaxStatistics(NamedTuple):
    """Log-sum-exp, float32 (..., heads) in the order of the result, and the random numbers' state."""

    lse: Tensor
    random_state: tuple[Tensor, Tensor]


class StatisticsKernel(Protocol):
    """Attention for (..., heads, dim) whose backward pass takes the result and the statistics."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, SoftmaxStatistics]:
        """Return the result (..., heads, v_dim) and its statistics."""
        ...

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mixed: Tensor, statistics: SoftmaxStatistics
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return gradients for q, k and v, given one for the result `mixed` (..., heads, v_dim)."""
        ...


def attend_with_optional_sinks(
    kernel: StatisticsKernel, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
) -> Tensor:
    """Return attention (..., heads, v_dim) by a kernel, with sinks (heads,) if they are not None."""
    return _AttendWithStatistics.apply(q, k, v, sinks, kernel)  # type: ignore[no-untyped-call, no-any-return]


class _AttendWithStatistics(Function):
    """Autograd function for attention by a kernel; sinks scale its result and enter its log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, kernel: StatisticsKernel) -> Tensor:
        """Return (..., heads, v_dim) like q (..., heads, head_dim); sinks are (heads,)."""
        mixed, (lse, random_state) = kernel.forward(q, k, v)
        if sinks is not None:
            mixed = mixed * (lse - sinks).sigmoid()[..., None].to(mixed.dtype)
            lse = torch.logaddexp(lse, sinks.to(lse.dtype))
        ctx.kernel = kernel
        ctx.save_for_backward(q, k, v, mixed, lse, *random_state, sinks)
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mixed, lse, seed, offset, sinks = ctx.saved_tensors
        grads = ctx.kernel.backward(grad, q, k, v, mixed, SoftmaxStatistics(lse, (seed, offset)))
        grad_sinks = _compute_sinks_gradient(grad, mixed, lse, sinks) if ctx.needs_input_grad[3] else None
        return *grads, grad_sinks, None


def _compute_sinks_gradient(grad: Tensor, mixed: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the sinks' gradient (heads,): minus their weights times the result's product with its gradient."""
    along = (grad.to(lse.dtype) * mixed).sum(-1)
    return -((sinks - lse).exp() * along).flatten(0, -2).sum(0).to(sinks.dtype)
