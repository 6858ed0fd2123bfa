"""Gradients that waited, computed and added to their weights by autograd itself, so that every hook of theirs fires."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from drawloom.kernels.deferred_grads import DeferredGrad

AT_ONCE = 2**22
"""Bytes of gradients that may exist before they are added, 4 MiB: more cost memory, fewer cost nodes (20 us each)."""


def accumulate_grads(put_off: Sequence[DeferredGrad]) -> None:
    """
    Compute the gradients that wait, and add each to its weight's `.grad`.

    Autograd takes a gradient over as a weight's `.grad` without a copy only if nobody else holds it. So it is computed
    within a node of the graph, one for each share of the weights, and not beforehand.
    """
    # Autograd starts at the root that was made last; what the pass for the inputs found last is still in the caches.
    roots = [_weight_grads(share) for share in reversed(_shares(put_off))]
    if roots:
        torch.autograd.backward(roots, [root.detach() for root in roots])  # the gradient of a root does not matter


def _shares(put_off: Sequence[DeferredGrad]) -> list[list[DeferredGrad]]:
    """Consecutive weights whose gradients take `AT_ONCE` bytes, or one weight if that takes more."""
    shares: list[list[DeferredGrad]] = []
    room = 0
    for each in put_off:
        if room <= 0:
            shares.append([])
            room = AT_ONCE
        shares[-1].append(each)
        room -= each.weight.nbytes
    return shares


def _weight_grads(put_off: list[DeferredGrad]) -> Tensor:
    return _WeightGrads.apply(put_off, *[each.weight for each in put_off])  # type: ignore[no-untyped-call, no-any-return]


class _WeightGrads(Function):
    """Its output is on the weights' device, and so their gradients are computed in the stream that is current there."""

    @staticmethod
    def forward(ctx: Any, put_off: list[DeferredGrad], *weights: Tensor) -> Tensor:
        ctx.put_off = put_off
        return weights[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *[each.compute() for each in ctx.put_off]
