"""Gradients that waited, computed and added to their weights by autograd itself, so that every hook of theirs fires."""

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.autograd import Function

from drawloom.kernels.deferred_grads import DeferredGrad

AT_ONCE = 2**22
"""Bytes of gradients that may exist before they are added, 4 MiB: more cost memory, fewer cost nodes (20 us each)."""

Roots = list[tuple[Any, Tensor | None]]
"""Tensors or edges to go backward from, with their gradients; without one, a loss has 1."""


@attrs.define(eq=False)
class DeferredWeightGrads:
    """
    What the pass for the weights has to do.

    `put_off`: weights whose gradients are still to be computed. `ready`: other weights with their gradients. `roots`:
    outputs of the stage that depend on weights alone. `cuts`: where to enter the graph again, for which weights.
    """

    put_off: list[DeferredGrad] = attrs.field(factory=list)
    ready: list[tuple[Tensor, Tensor]] = attrs.field(factory=list)
    roots: Roots = attrs.field(factory=list)
    cuts: list[tuple[Roots, list[Tensor]]] = attrs.field(factory=list)

    def accumulate(self) -> None:
        """Compute what is left to compute, and add each gradient to its weight's `.grad`."""
        _go_backward([*_deliveries(self.put_off, self.ready), *self.roots])
        while self.cuts:
            roots, weights = self.cuts.pop()
            _go_backward(roots, inputs=weights, retain_graph=True)  # two cuts may enter the graph at one node

    def clear(self) -> None:
        """Let go of everything, done or not."""
        for each in self.put_off:
            each.forget()
        self.put_off, self.ready, self.roots, self.cuts = [], [], [], []


def _go_backward(roots: Roots, **settings: Any) -> None:
    if roots:
        tensors, grads = zip(*roots, strict=True)
        torch.autograd.backward(tensors, grads, **settings)


def _deliveries(put_off: Sequence[DeferredGrad], ready: list[tuple[Tensor, Tensor]]) -> Roots:
    """
    A root for each share of the weights: going backward from it computes and adds the gradients of that share.

    Autograd takes a gradient over as a weight's `.grad` without a copy only if nobody else holds it. So it is computed
    within a node of the graph, and not beforehand.
    """
    shares: list[list[DeferredGrad]] = [[]] if ready else []
    room = AT_ONCE if ready else 0
    for each in put_off:
        if room <= 0:
            shares.append([])
            room = AT_ONCE
        shares[-1].append(each)
        room -= each.weight.nbytes
    # Autograd starts at the root that was made last; what the pass for the inputs found last is still in the caches.
    roots: list[Tensor] = [_delivery(share, ready if share is shares[0] else []) for share in reversed(shares)]
    return [(root, root.detach()) for root in roots]  # what a root is given as its own gradient does not matter


def _delivery(put_off: list[DeferredGrad], ready: list[tuple[Tensor, Tensor]]) -> Tensor:
    weights = [each.weight for each in put_off] + [weight for weight, _ in ready]
    return _Delivery.apply(put_off, ready, *weights)  # type: ignore[no-untyped-call, no-any-return]


class _Delivery(Function):
    """Its output is on the weights' device, and so their gradients are computed in the stream that is current there."""

    @staticmethod
    def forward(ctx: Any, put_off: list[DeferredGrad], ready: list[tuple[Tensor, Tensor]], *weights: Tensor) -> Tensor:
        ctx.put_off, ctx.ready = put_off, ready
        return weights[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        ready = [grad for _, grad in ctx.ready]
        ctx.ready.clear()
        return None, None, *[each.compute() for each in ctx.put_off], *ready
