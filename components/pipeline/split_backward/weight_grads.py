"""Computing deferred weight gradients, and adding them up as autograd would."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from drawloom.kernels.deferred_grads import DeferredGrad

CHUNK_BYTES = 2**22
"""Bytes of gradients that are computed before they are accumulated: more cost memory, fewer cost nodes (20 us each)."""


class WeightGrads:
    """
    Computes deferred gradients and adds each to its weight's `.grad`.

    That is left to autograd where there is no `.grad` yet or a hook waits for it. Autograd makes a gradient a weight's
    `.grad` without a copy only if it holds the only reference. So gradients are computed within a node of the graph,
    one for each chunk of weights, and not beforehand. To make one takes microseconds: microbatches that share an
    instance share the nodes.
    """

    __slots__ = ("_nodes",)

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, ...], _Root] = {}

    def add(self, deferred: Sequence[DeferredGrad]) -> None:
        """Accumulate the deferred gradients of weights (any shapes), whose hooks are called once."""
        # Those of the first layers come first: their tensors are still in the caches.
        with torch.no_grad():
            left = [each for each in deferred if not each.add_to_grad()]
        if not left:
            return
        # Autograd starts at the root created last.
        nodes = [self._node(chunk) for chunk in reversed(_chunks(left))]
        try:
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
