"""Computation of deferred weight gradients, accumulated exactly like autograd does."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from drawloom.kernels.deferral import DeferredGrad

CHUNK_BYTES = 2**22
"""Bytes of gradients that are computed before they are accumulated: a trade of memory for nodes (20 us per node)."""


class WeightGrads:
    """
    Accumulator of deferred gradients into their weights' `.grad`.

    Autograd accumulates if a weight has no `.grad` yet, or has a hook. Autograd uses a gradient as `.grad` without a
    copy only if it has the only reference. So gradients are computed within a node of the graph, one node per chunk of
    weights, and not beforehand. Creating a node takes microseconds: microbatches that share an instance share nodes.
    """

    __slots__ = ("_nodes",)

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, ...], _Root] = {}

    def accumulate(self, deferred: Sequence[DeferredGrad]) -> None:
        """Accumulate the deferred gradients of weights (any shapes), whose hooks are called once."""
        # The first layers come first, because their tensors are still in the caches.
        with torch.no_grad():
            left = [gradient for gradient in deferred if not gradient.try_to_add_to_grad()]
        if not left:
            return
        # Autograd starts at the root created last.
        nodes = [self._get_reusable_node(chunk) for chunk in reversed(_split_into_chunks(left))]
        try:
            roots, grads = zip(*((node.root, node.grad) for node in nodes), strict=True)
            torch.autograd.backward(roots, grads, retain_graph=True)
        finally:
            for node in nodes:
                node.deferred.clear()

    def _get_reusable_node(self, chunk: list[DeferredGrad]) -> "_Root":
        """Return a node to compute a chunk's gradients, reused for the same weights."""
        weights = [gradient.weight for gradient in chunk]
        key = tuple(map(id, weights))
        if (node := self._nodes.get(key)) is None:
            node = _Root(weights)
            # The node references leaves, so that their ids stay unique; a view of a leaf belongs to one microbatch.
            if all(weight.is_leaf for weight in weights):
                self._nodes[key] = node
        node.deferred[:] = chunk
        return node


class _Root:
    """Graph root whose backward pass computes the `deferred` weight gradients."""

    __slots__ = ("deferred", "grad", "root")

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.deferred: list[DeferredGrad] = []
        self.root: Tensor = _Computing.apply(self.deferred, *weights)  # type: ignore[no-untyped-call]
        self.grad = self.root.detach()  # _Computing ignores its output's gradient


def _split_into_chunks(deferred: Sequence[DeferredGrad]) -> list[list[DeferredGrad]]:
    """Split gradients into chunks; a chunk ends once its weights take CHUNK_BYTES."""
    chunks: list[list[DeferredGrad]] = []
    bytes_left = 0
    for gradient in deferred:
        if bytes_left <= 0:
            chunks.append([])
            bytes_left = CHUNK_BYTES
        chunks[-1].append(gradient)
        bytes_left -= gradient.weight.nbytes
    return chunks


class _Computing(Function):
    """Autograd node whose backward pass computes deferred weight gradients."""

    # The output is on the weights' device, so that autograd runs the backward pass in the current stream there.

    @staticmethod
    def forward(ctx: Any, deferred: list[DeferredGrad], *weights: Tensor) -> Tensor:
        """Return an uninitialized tensor without dimensions, on the device of the weights (any shapes)."""
        ctx.deferred = deferred
        return weights[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *[gradient.drain_and_return_remaining_grad() for gradient in ctx.deferred]
