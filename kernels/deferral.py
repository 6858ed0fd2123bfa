"""
Deferred weight gradients for zero-bubble schedules.

The backward pass for a stage's inputs queues the tensors from which weight gradients are computed later. Queued tensors
are not copied. If one is changed in place before its gradient is computed, its version counter detects the change, as
for tensors that autograd saves.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from drawloom.kernels import deferred_grads
from drawloom.kernels.deferred_grads import Compute, Recording, add_to_grad, has_hooks


class ChangedInPlaceError(RuntimeError):
    """Error for a tensor changed in place before its deferred weight gradient was computed."""


VersionedTensors = tuple[tuple[Tensor, ...], list[int]]
"""Tensors, and the versions that they must still have when they are used."""


def record_versions(*tensors: Tensor) -> VersionedTensors:
    """Return tensors (any shapes) with their version counters, which show later whether they changed in place."""
    return tensors, [tensor._version for tensor in tensors]


class DeferredGrad:
    """Deferrable weight gradient: a queue with its summands, in backward order."""

    __slots__ = ("_pending", "active", "weight")

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.active = False
        self._pending: list[tuple[Compute, VersionedTensors]] = []

    def __call__(self, compute: Compute, *tensors: Tensor) -> Tensor | None:
        """Compute a summand (the weight's shape), or queue it and return None while deferral is active."""
        if not self.active:
            return compute(*tensors)
        self.queue_summand(compute, *tensors)
        return None

    def queue_summand(self, compute: Compute, *tensors: Tensor) -> None:
        """Queue a summand; `tensors` (any shapes) live until it is computed."""
        self._pending.append((compute, record_versions(*tensors)))

    def queue_versioned_summand(self, compute: Compute, tensors: VersionedTensors) -> None:
        """Queue a summand whose tensors other summands may share."""
        self._pending.append((compute, tensors))

    def queue_computed_summand(self, part: Tensor | None) -> None:
        """Queue a summand that is already computed (the weight's shape); None queues nothing."""
        if part is not None:
            self.queue_summand(_identity, part)

    def __bool__(self) -> bool:
        return bool(self._pending)

    def drop_queued_summands(self) -> None:
        """Drop the queued summands and their tensors."""
        self._pending = []

    def drain_and_return_remaining_grad(self) -> Tensor | None:
        """
        Compute the queued summands and return the sum (the weight's shape) of the summands that `.grad` lacks.

        Empties the queue. Raises ChangedInPlaceError if a queued tensor was changed in place.
        """
        weight, pending = self.weight, self._pending
        # A weight that is a view (a transpose) is not a leaf; autograd casts its gradient when it reaches the leaf.
        leaf, grad = weight.is_leaf, weight.grad if weight.is_leaf else None
        is_fused = leaf and weight.device.type in deferred_grads.FUSED
        total: Tensor | None = None
        # Each summand is released before the next is computed, so that few exist at a time.
        while pending:
            compute, (tensors, versions) = pending.pop(0)
            if versions != [tensor._version for tensor in tensors]:
                raise ChangedInPlaceError(_describe_in_place_change(tensors, versions, weight))
            summand = add_to_grad(weight, compute, *tensors) if is_fused else compute(*tensors)
            if summand is None:
                continue
            if leaf and (grad is None or grad.dtype != summand.dtype):
                summand = summand.to(dtype=weight.grad_dtype)
            total = summand if total is None else total + summand
        return total

    def try_to_add_to_grad(self) -> bool:
        """
        Add the queued summands to the weight's `.grad` in place and return True, or return False and do nothing.

        Autograd must add them for a weight that has no `.grad` yet, has hooks, or is not a leaf. Otherwise autograd
        would add the same sum, but small layers take less time than autograd takes to start.
        """
        weight = self.weight
        if not weight.is_leaf or (grad := weight.grad) is None or has_hooks(weight) or grad.layout != torch.strided:
            return False
        if (total := self.drain_and_return_remaining_grad()) is not None:
            grad += total
        return True


class Deferral(Recording):
    """
    Deferrable weight gradients for the operations within it: one forward pass.

    Its backward pass, within `defer`, queues their summands.
    """

    __slots__ = ("_grads",)

    def __init__(self) -> None:
        self._grads: dict[int, DeferredGrad] = {}  # by the weight's id: the hash of a tensor is slow

    def defer(self, except_for: Iterable[Tensor] = ()) -> "_Deferring":
        """Return a context manager for backward passes that defer recorded weights' gradients, with exceptions."""
        ids = set(map(id, except_for))
        return _Deferring([grad for key, grad in self._grads.items() if key not in ids])

    def gradient_function_for(self, weight: Tensor) -> DeferredGrad:
        """Return a weight's deferrable gradient (any shape)."""
        if (grad := self._grads.get(id(weight))) is None:
            grad = self._grads[id(weight)] = DeferredGrad(weight)
        return grad

    def take_queued_gradients(self) -> list[DeferredGrad]:
        """Remove all gradients, and return the gradients with queued summands."""
        deferred, self._grads = self._grads, {}
        return [grad for grad in deferred.values() if grad._pending]


class _Deferring:
    """Context manager for a backward pass whose gradients in `deferred` are queued instead of computed."""

    __slots__ = ("_deferred",)

    def __init__(self, deferred: Sequence[DeferredGrad]) -> None:
        self._deferred = deferred

    def __enter__(self) -> None:
        for grad in self._deferred:
            grad.active = True

    def __exit__(self, *_: object) -> None:
        for grad in self._deferred:
            grad.active = False


def _identity(part: Tensor) -> Tensor:
    return part


def _describe_in_place_change(tensors: tuple[Tensor, ...], versions: list[int], weight: Tensor) -> str:
    """Name the tensor changed in place and the weight, by dtype and shape, and the remedy."""
    changed = next(tensor for tensor, version in zip(tensors, versions, strict=True) if tensor._version != version)
    texts = [f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}" for tensor in (changed, weight)]
    return (
        f"a tensor {texts[0]} was changed in place before the deferred gradient of a weight {texts[1]} was "
        "computed; change a copy instead (in a custom backward `grad * 2`, not `grad.mul_(2)`)"
    )
