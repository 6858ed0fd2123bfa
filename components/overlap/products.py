"""
Tensor-parallel products, with exchanges beside them.

A rank multiplies its own tokens while it receives the other ranks', and multiplies other ranks' tokens first, so that
their sums travel while it multiplies its own (Wang et al. 2023, "Overlap Communication with Dependent Computation via
Decomposition in Large Deep Learning Models", ASPLOS 2023, section 5.1). Weight gradients are one product each, computed
while the last sums travel.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from drawloom.components.overlap.shifts import Shifts
from drawloom.kernels.deferred_grads import WeightGradient, get_weight_gradient_function
from drawloom.kernels.gradients.eager import sum_parts
from drawloom.kernels.linear import LINEAR_WEIGHT_GRADIENT
from drawloom.kernels.operation import once_differentiable
from drawloom.ports import Pending


def multiply_gathered(own: Tensor, weights: Sequence[Tensor], ranks: Shifts) -> Sequence[Tensor]:
    """
    Gather all ranks' tokens, and multiply them by weights.

    own: this rank's tokens (n, inputs); weights: (outputs, inputs), in the same dtype. Returns x @ weight.T for all
    tokens x, (ranks * n, outputs), by weight. The tokens' gradients are summed over the ranks.
    """
    gradients = [get_weight_gradient_function(weight) for weight in weights]
    outputs: Sequence[Tensor] = _GatheredProducts.apply(own, ranks, gradients, *weights)  # type: ignore[no-untyped-call]
    return outputs


def multiply_and_scatter(x: Tensor, weight: Tensor, ranks: Shifts) -> Tensor:
    """
    Multiply all tokens x (ranks * n, inputs) by weight (outputs, inputs), in the same dtype, and sum over the ranks.

    Returns the sums for this rank's tokens, (n, outputs).
    """
    output: Tensor = _ScatteredProduct.apply(x, weight, get_weight_gradient_function(weight), ranks)  # type: ignore[no-untyped-call]
    return output


class _GatheredProducts(Function):
    @staticmethod
    def forward(
        ctx: Any, own: Tensor, ranks: Shifts, weight_gradients: Sequence[WeightGradient], *weights: Tensor
    ) -> tuple[Tensor, ...]:
        """Return (ranks * n, outputs) by weight: own (n, inputs), weights (outputs, inputs)."""
        outputs = [own.new_empty(ranks.size, len(own), len(weight)) for weight in weights]
        gathered = own.new_empty(ranks.size, *own.shape)
        for rank, part in _gather(own, gathered, ranks):
            for weight, output in zip(weights, outputs, strict=True):
                torch.mm(part, weight.t(), out=output[rank])
        ctx.save_for_backward(gathered.flatten(0, 1), *weights)
        ctx.ranks, ctx.weight_gradients = ranks, weight_gradients
        return tuple(output.flatten(0, 1) for output in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gathered, *weights = ctx.saved_tensors
        ranks: Shifts = ctx.ranks
        needs_own, needs_weights = ctx.needs_input_grad[0], ctx.needs_input_grad[3:]
        finish = None
        if needs_own:
            total = torch.mm(grads[0], weights[0])
            for grad, weight in zip(grads[1:], weights[1:], strict=True):
                total.addmm_(grad, weight)
            # The products for weight gradients take longer than the exchange.
            finish = _multiply_and_sum(total.view(ranks.size, -1, total.shape[-1]).__getitem__, ranks)
        weight_grads = [
            compute(LINEAR_WEIGHT_GRADIENT, grad, gathered) if needs else None
            for compute, grad, needs in zip(ctx.weight_gradients, grads, needs_weights, strict=True)
        ]
        return (finish() if finish else None), None, None, *weight_grads


class _ScatteredProduct(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, weight_gradient: WeightGradient, ranks: Shifts) -> Tensor:
        """Return sums (n, outputs): x (ranks * n, inputs), weight (outputs, inputs)."""
        ctx.save_for_backward(x, weight)
        ctx.ranks, ctx.weight_gradient = ranks, weight_gradient
        parts = x.view(ranks.size, -1, x.shape[-1])
        return _multiply_and_sum(lambda rank: torch.mm(parts[rank], weight.t()), ranks)()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ranks: Shifts = ctx.ranks
        gathered = grad.new_empty(ranks.size, *grad.shape)
        grad_x = torch.empty_like(x)
        parts = grad_x.view(ranks.size, -1, x.shape[-1])
        for rank, part in _gather(grad.contiguous(), gathered, ranks):
            torch.mm(part, weight, out=parts[rank])
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        grads = gathered.flatten(0, 1)
        weight_grad = ctx.weight_gradient(LINEAR_WEIGHT_GRADIENT, grads, x.detach()) if needs_weight else None
        return grad_x if needs_x else None, weight_grad, None, None


def _gather(own: Tensor, gathered: Tensor, ranks: Shifts) -> Iterator[tuple[int, Tensor]]:
    """
    Gather own (n, width) from all ranks into `gathered` (ranks, n, width); yield each rank's part, this one's first.
    """
    pending: list[tuple[int, Pending]] = []
    for distance in range(1, ranks.size):
        rank = (ranks.rank - distance) % ranks.size
        pending.append((rank, ranks.start_shift(own, gathered[rank], distance)))
    yield ranks.rank, own
    gathered[ranks.rank].copy_(own)
    for rank, transfer in pending:
        transfer.wait()
        yield rank, gathered[rank]


def _multiply_and_sum(multiply: Callable[[int], Tensor], ranks: Shifts) -> Callable[[], Tensor]:
    """
    Send `multiply(rank)`, (n, width), to every other rank; the result waits for theirs, and returns the sum (n, width).
    """
    sent: list[tuple[Tensor, Pending]] = []
    received: Tensor | None = None
    for distance in range(1, ranks.size):
        part = multiply((ranks.rank + distance) % ranks.size)
        if received is None:
            received = part.new_empty(ranks.size - 1, *part.shape)
        sent.append((part, ranks.start_shift(part, received[distance - 1], distance)))
    own = multiply(ranks.rank)

    def finish() -> Tensor:
        assert received is not None
        for _, transfer in sent:
            transfer.wait()
        if own.dtype.itemsize == 2:
            sum_parts(own.view(-1), received.flatten(1), own.view(-1))
        else:
            own.add_(received.sum(0))
        return own

    return finish
