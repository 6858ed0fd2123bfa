"""
Backward pass of a stage in two parts: first for its inputs (I), which another stage needs, then for its weights (W).

Zero-bubble schedules (Qi et al., "Zero Bubble Pipeline Parallelism", 2023, arXiv 2401.10241) fill their bubbles with
the second part. The autograd graph of a microbatch decides which gradients are deferred, leaf by leaf:

1. Kernels that use kernels/deferred_grads.py queue the inputs of their weights' gradients.
2. Other matmuls with a weight (`nn.Linear`) are found in the graph and deferred in the same way.
3. All other gradients of leaves are computed with the gradients of the inputs, and accumulated in W with the rest.

So every leaf that a full backward pass would reach gets its gradient, summed exactly as by autograd, even if it belongs
to no module.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from drawloom import UserError
from drawloom.components.pipeline.split_backward.matmul_grads import defer_and_return_other_leaves, find_node_users
from drawloom.kernels.deferral import ChangedInPlaceError, Deferral, DeferredGrad
from drawloom.ports import ReductionUnit

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


Roots = list[tuple[Tensor, Tensor | None]]
"""Outputs with their gradients; None means the gradient 1 of a loss."""


class SplitBackward:
    """
    Split backward pass of one stage for one microbatch; create an instance per stage and microbatch.

        split = SplitBackward()
        with split.forward_context():
            output = module(given, shared)
        ...
        (grad_given,) = split.backward_input([output], [grad_output], [given])    # I: send it, and drop the output
        ...
        split.backward_weight()                              # W: now the parameters have their gradients

    Microbatches of one stage take less time if they share `weights`, if all backward passes run in one stream.

    A forward pass within `forward_context` can have a full backward pass: `torch.autograd.backward(output, grad)`.
    A pass that raises an error leaves no state behind, except for gradients that W has already accumulated.
    """

    __slots__ = ("_deferral", "_deferred", "_weights")

    def __init__(self, weights: WeightGrads | None = None) -> None:
        self._weights = WeightGrads() if weights is None else weights
        self._deferral = Deferral()
        self._deferred: list[DeferredGrad] | None = None

    def forward_context(self) -> AbstractContextManager[None]:
        """Return the context to run the stage's forward pass in; outside it, our kernels defer no gradients."""
        return self._deferral

    def backward_input(
        self, outputs: Sequence[Any], output_grads: Sequence[Tensor | None] | None, inputs: Sequence[Any]
    ) -> list[Tensor | None]:
        """
        Run I: return the inputs' gradients or None. No `.grad` changes, and no leaf's hook is called.

        `outputs` and `inputs` are the leaves of the stage's results and arguments; integers, None and tensors without
        gradient are skipped. `output_grads` are the gradients of the outputs, with None for an unused output, or None
        if all outputs are losses, whose gradient is 1. The graph is freed as in a full backward pass.

        Raises UserError for graphs that can't be split: a re-entrant checkpoint, or a hook on activations and weights.
        """
        if self._deferred is not None:
            raise RuntimeError("backward_input was already called; call backward_weight, or create a new SplitBackward")
        differentiable = [tensor for tensor in inputs if _is_differentiable(tensor)]
        try:
            grads = iter(
                self._compute_input_grads(_select_differentiable_outputs(outputs, output_grads), differentiable)
            )
        except BaseException:
            _drop_kept_tensors(self._deferral.take_queued_gradients())
            raise
        self._deferred = self._deferral.take_queued_gradients()
        # autograd.grad only returned gradients of the differentiable inputs.
        return [next(grads) if _is_differentiable(tensor) else None for tensor in inputs]

    def backward_weight(self, parts: Sequence[ReductionUnit] = ()) -> None:
        """
        Run W: accumulate the gradients of leaves into their `.grad`; their hooks are called once.

        The gradients of `parts` come first, part by part; a part is reduced while the next part is computed.

        Call this in the stream of the forward pass. Raises UserError if a tensor that a gradient needs was changed in
        place after I.
        """
        deferred, self._deferred = self._deferred, None
        if deferred is None:
            raise RuntimeError("backward_weight has nothing to compute: call it once after each backward_input")
        try:
            *by_part, rest = _group_by_part(deferred, parts)
            for part, gradients in zip(parts, by_part, strict=True):
                self._weights.accumulate(gradients)
                part.reduce()
            self._weights.accumulate(rest)
        except BaseException as error:
            _drop_kept_tensors(deferred)
            if not isinstance(error, ChangedInPlaceError):
                raise
            raise UserError(f"split backward: between the two passes, {error}") from error

    def _compute_input_grads(self, roots: Roots, inputs: list[Tensor]) -> Sequence[Tensor | None]:
        """Return the inputs' gradients, and queue the leaves' gradients for W."""
        outputs, grads = [output for output, _ in roots], [grad for _, grad in roots]
        leaves, handles = defer_and_return_other_leaves(find_node_users(outputs, inputs), self._deferral)
        # autograd.grad raises an error for an empty list of inputs or outputs.
        if not (inputs or leaves) or not roots:
            return [None] * len(inputs)
        try:
            with self._deferral.defer(except_for=inputs), _Capturing(leaves, self._deferral):
                asked = [*inputs, *leaves]
                return torch.autograd.grad(outputs, asked, grads, allow_unused=True)[: len(inputs)]
        except RuntimeError as error:
            if (refusal := _explain_split_error(error)) is None:
                raise
            raise refusal from error
        finally:
            for handle in handles:
                handle.remove()


def _select_differentiable_outputs(outputs: Sequence[Any], output_grads: Sequence[Tensor | None] | None) -> Roots:
    """Return the differentiable outputs (any shapes) with their gradients; unused outputs are left out."""
    if output_grads is None:
        return [(output, None) for output in outputs if _is_differentiable(output)]
    pairs = zip(outputs, output_grads, strict=True)
    return [(output, grad) for output, grad in pairs if grad is not None and _is_differentiable(output)]


def _is_differentiable(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _group_by_part(deferred: Iterable[DeferredGrad], parts: Sequence[ReductionUnit]) -> list[list[DeferredGrad]]:
    """Return gradients grouped by the part of their parameter; the last group contains parameters without a part."""
    part_of = {parameter: number for number, part in enumerate(parts) for parameter in part.parameters}
    groups: list[list[DeferredGrad]] = [[] for _ in range(len(parts) + 1)]
    for gradient in deferred:
        groups[part_of.get(id(gradient.weight), -1)].append(gradient)
    return groups


def _drop_kept_tensors(deferred: Iterable[DeferredGrad]) -> None:
    """Drop the tensors from which deferred gradients would be computed."""
    for gradient in deferred:
        gradient.drop_queued_summands()


_CAPTURE = -1
"""Key of our hook among the hooks of a leaf; torch numbers its own hooks from 0."""


class _Capturing:
    """
    Context in which autograd queues leaf gradients for W, and does not call the leaves' own hooks.

    A hook captures a gradient, because it receives the gradient before anything can change it in place.
    """

    __slots__ = ("_captured", "_deferral", "_leaves", "_suspended")

    def __init__(self, leaves: Iterable[Tensor], deferral: Deferral) -> None:
        self._leaves, self._deferral = leaves, deferral
        self._captured: list[dict[int, Any]] = []
        self._suspended: list[tuple[dict[int, Any], dict[int, Any]]] = []

    def __enter__(self) -> None:
        for leaf in self._leaves:
            hooks = _get_leaf_hooks(leaf)
            if hooks:
                self._suspended.append((hooks, dict(hooks)))
                hooks.clear()
            hooks[_CAPTURE] = self._deferral.gradient_function_for(leaf).queue_computed_summand
            self._captured.append(hooks)

    def __exit__(self, *_: object) -> None:
        for hooks in self._captured:
            del hooks[_CAPTURE]
        for hooks, others in self._suspended:
            hooks.update(others)


def _get_leaf_hooks(leaf: Tensor) -> dict[int, Any]:
    """Return the dict of a leaf's hooks, which torch calls with its gradient."""
    # torch creates the dict with the first hook.
    if leaf._backward_hooks is None:
        leaf.register_hook(lambda _: None).remove()  # type: ignore[no-untyped-call]
    hooks: dict[int, Any] = leaf._backward_hooks  # type: ignore[assignment]
    return hooks


_REFUSED = {
    "use_reentrant=True": "the stage recomputes in a re-entrant checkpoint, which can't go backward for the inputs "
    "alone; write torch.utils.checkpoint.checkpoint(..., use_reentrant=False)",
    "_will_engine_execute_node": "a hook of register_multi_grad_hook needs the gradients of activations and of "
    "weights, which come in two passes; register one for the activations and one for the weights",
}
"""Error messages, by a part of torch's message."""


def _explain_split_error(error: RuntimeError) -> UserError | None:
    """Return a UserError explaining torch's message for a graph that can't be split; None for other errors."""
    text = next((ours for theirs, ours in _REFUSED.items() if theirs in str(error)), None)
    return None if text is None else UserError(f"split backward: {text}")
