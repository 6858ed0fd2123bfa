"""
A stage's backward pass in two: first for its inputs (I), which another stage needs, then for its weights (W).

Zero-bubble schedules (Qi et al., "Zero Bubble Pipeline Parallelism", 2023, arXiv 2401.10241) fill their bubbles with
the second part. Which gradients are deferred is decided from the autograd graph of each microbatch, leaf by leaf:

1. Kernels that use kernels/deferred_grads.py queue what the gradients of their weights need.
2. Other matmuls with a weight (`nn.Linear`) are found in the graph and deferred likewise.
3. All other gradients of leaves are computed with those of the inputs, and accumulated in W with the rest.

So every leaf that a full backward pass would reach gets its gradient, also one that belongs to no module.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from drawloom.components.pipeline.split_backward.matmul_grads import defer_products, users_of
from drawloom.components.pipeline.split_backward.weight_grads import WeightGrads
from drawloom.components.ports.stages import ReducedPart
from drawloom.graph import UserError
from drawloom.kernels.deferred_grads import ChangedInPlaceError, Deferral, DeferredGrad

Roots = list[tuple[Tensor, Tensor | None]]
"""Outputs with their gradients; None is the gradient 1 of a loss."""


class SplitBackward:
    """
    Both backward passes of one stage for one microbatch; create an instance for each pair.

        split = SplitBackward()
        with split.forward():
            output = module(given, shared)
        ...
        (grad_given,) = split.backward_input([output], [grad_output], [given])    # I: send it, and drop the output
        ...
        split.backward_weight()                              # W: now the parameters have their gradients

    Microbatches of one stage take less time if they share `weights`, as long as all are backward in one stream.

    What ran within `forward` can have a full backward pass instead: `torch.autograd.backward(output, grad_output)`.
    A pass that raises an error leaves no state behind, except gradients that W has accumulated already.
    """

    __slots__ = ("_deferral", "_deferred", "_weights")

    def __init__(self, weights: WeightGrads | None = None) -> None:
        self._weights = WeightGrads() if weights is None else weights
        self._deferral = Deferral()
        self._deferred: list[DeferredGrad] | None = None

    def forward(self) -> AbstractContextManager[None]:
        """The context for the stage's forward pass; outside of it, gradients of our kernels are not deferred."""
        return self._deferral

    def backward_input(
        self, outputs: Sequence[Any], output_grads: Sequence[Tensor | None] | None, inputs: Sequence[Any]
    ) -> list[Tensor | None]:
        """
        I: the gradient of each input (its shape and dtype), or None. No `.grad` changes, and no leaf's hook is called.

        `outputs` and `inputs` are the leaves of the stage's results and arguments; integers, None and tensors without
        gradient are skipped. `output_grads` has a gradient for each output, any shape, or None for an unused one;
        None as a whole if every output is a loss, whose gradient is 1. The graph is freed as in a full backward pass.

        Raises UserError for what can't be split: a re-entrant checkpoint, and a hook on activations and weights.
        """
        if self._deferred is not None:
            raise RuntimeError("backward_input was called before; call backward_weight, or create a SplitBackward")
        wanted = [given for given in inputs if _differentiable(given)]
        try:
            found = iter(self._run(_roots(outputs, output_grads), wanted))
        except BaseException:
            _clear(self._deferral.take())
            raise
        self._deferred = self._deferral.take()
        # autograd.grad returned gradients for the differentiable inputs alone.
        return [next(found) if _differentiable(given) else None for given in inputs]

    def backward_weight(self, parts: Sequence[ReducedPart] = ()) -> None:
        """
        W: accumulate the gradient of each leaf into its `.grad`; its hooks are called once.

        Those of `parts` come first, part by part, and each is reduced while the next one is computed.

        Call it in the stream of the forward pass. Raises UserError if a tensor that a gradient needs was changed in
        place after I.
        """
        deferred, self._deferred = self._deferred, None
        if deferred is None:
            raise RuntimeError("backward_weight has nothing to compute: call it once after each backward_input")
        try:
            *of_parts, of_none = _by_part(deferred, parts)
            for part, gradients in zip(parts, of_parts, strict=True):
                self._weights.add(gradients)
                part.reduce()
            self._weights.add(of_none)
        except BaseException as error:
            _clear(deferred)
            if not isinstance(error, ChangedInPlaceError):
                raise
            raise UserError(f"split backward: between the two passes, {error}") from error

    def _run(self, roots: Roots, inputs: list[Tensor]) -> Sequence[Tensor | None]:
        """The gradients of the inputs; those of the leaves are deferred."""
        outputs, grads = [output for output, _ in roots], [grad for _, grad in roots]
        leaves, handles = defer_products(users_of(outputs, inputs), self._deferral)
        # autograd.grad raises an error for an empty list of inputs or outputs.
        if not (inputs or leaves) or not roots:
            return [None] * len(inputs)
        try:
            with self._deferral.defer(except_for=inputs), _Capturing(leaves, self._deferral):
                asked = [*inputs, *leaves]
                return torch.autograd.grad(outputs, asked, grads, allow_unused=True)[: len(inputs)]
        except RuntimeError as error:
            if (refusal := _refusal(error)) is None:
                raise
            raise refusal from error
        finally:
            for handle in handles:
                handle.remove()


def _roots(outputs: Sequence[Any], output_grads: Sequence[Tensor | None] | None) -> Roots:
    """The differentiable outputs with their gradients."""
    if output_grads is None:
        return [(output, None) for output in outputs if _differentiable(output)]
    pairs = zip(outputs, output_grads, strict=True)
    return [(output, grad) for output, grad in pairs if grad is not None and _differentiable(output)]


def _differentiable(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _by_part(deferred: Iterable[DeferredGrad], parts: Sequence[ReducedPart]) -> list[list[DeferredGrad]]:
    """The gradients of each part's parameters, and last those of parameters that are in none."""
    place = {parameter: number for number, part in enumerate(parts) for parameter in part.parameters}
    found: list[list[DeferredGrad]] = [[] for _ in range(len(parts) + 1)]
    for each in deferred:
        found[place.get(id(each.weight), -1)].append(each)
    return found


def _clear(deferred: Iterable[DeferredGrad]) -> None:
    for each in deferred:
        each.clear()


_CAPTURE = -1
"""The key of our hook among the hooks of a leaf; torch numbers its own from 0."""


class _Capturing:
    """
    A context that queues the gradients that autograd computes for leaves, without their own hooks, which W calls.

    A hook captures them, because it sees a gradient before anything can change it in place.
    """

    __slots__ = ("_captured", "_deferral", "_leaves", "_suspended")

    def __init__(self, leaves: Iterable[Tensor], deferral: Deferral) -> None:
        self._leaves, self._deferral = leaves, deferral
        self._captured: list[dict[int, Any]] = []
        self._suspended: list[tuple[dict[int, Any], dict[int, Any]]] = []

    def __enter__(self) -> None:
        for leaf in self._leaves:
            hooks = _hooks(leaf)
            if hooks:
                self._suspended.append((hooks, dict(hooks)))
                hooks.clear()
            hooks[_CAPTURE] = self._deferral.grad_for(leaf).add
            self._captured.append(hooks)

    def __exit__(self, *_: object) -> None:
        for hooks in self._captured:
            del hooks[_CAPTURE]
        for hooks, others in self._suspended:
            hooks.update(others)


def _hooks(leaf: Tensor) -> dict[int, Any]:
    """The dict of a leaf's hooks, which torch calls with its gradient."""
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
"""Error messages by a part of torch's message."""


def _refusal(error: RuntimeError) -> UserError | None:
    """What a message of torch means for those who wrote the stage; None if it is another error."""
    found = next((ours for theirs, ours in _REFUSED.items() if theirs in str(error)), None)
    return None if found is None else UserError(f"split backward: {found}")
