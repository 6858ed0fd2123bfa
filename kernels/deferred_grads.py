"""
Weight gradients that autograd does not add: they are deferred, or added to `.grad` while they are computed.

Deferral serves zero-bubble schedules: the backward pass for a stage's inputs queues the tensors from which weight
gradients are computed later.

An operation calls `get_weight_gradient_function(weight)` in its forward pass and keeps the result on its `ctx`. Its
backward pass calls the result with the function that computes the weight's gradient, which then runs at once or is
queued. A graph recorded under a deferral is an ordinary graph, except for backward passes within `defer`.

Queued tensors are not copied. If one is changed in place before its gradient is computed, its version counter detects
the change, as for tensors that autograd saves.

Gradient accumulation: operations that ran within an `Accumulation` add `Addable` gradients, such as a linear layer's,
to the weight's `.grad` while computing them, in the dtype of `.grad`. Autograd would write a product in the weight's
dtype, cast it, and add it: with bfloat16 weights and float32 gradients that moves 20 bytes per element instead of 8.

The forward pass's recording is the only ambient state, a context variable in the calling thread. The backward pass (on
an accelerator, in autograd's threads) reads it from `ctx`; a recomputed forward pass needs none.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils.hooks import RemovableHandle

Compute = Callable[..., Tensor]
"""Compute a weight's gradient, or one summand of it, from tensors."""


class Addable(ABC):
    """Function that can add its summand to a sum, in the sum's dtype, without writing the summand first."""

    @abstractmethod
    def __call__(self, *tensors: Tensor) -> Tensor:
        """Return the summand (the weight's shape) in the tensors' dtype."""

    @abstractmethod
    def compute_in_dtype(self, dtype: torch.dtype, *tensors: Tensor) -> Tensor:
        """Return the summand (the weight's shape) in a dtype at least as wide."""

    @abstractmethod
    def add_to(self, summed: Tensor, *tensors: Tensor) -> None:
        """Add the summand to a contiguous tensor with its shape, in a dtype at least as wide."""


@dataclass(frozen=True)
class MatrixProduct(Addable):
    """Product (rows, columns) of two matrices, which `factors` computes from the tensors."""

    factors: Callable[..., tuple[Tensor, Tensor]]

    def __call__(self, *tensors: Tensor) -> Tensor:
        """Return the product (rows, columns) in the factors' dtype."""
        return torch.mm(*self.factors(*tensors))

    def compute_in_dtype(self, dtype: torch.dtype, *tensors: Tensor) -> Tensor:
        """Return the product (rows, columns) in a dtype."""
        a, b = self.factors(*tensors)
        if dtype != a.dtype and _can_write_product_in_dtype(a, dtype):
            return torch.mm(a, b, out_dtype=dtype)
        return torch.mm(a.to(dtype), b.to(dtype))

    def add_to(self, summed: Tensor, *tensors: Tensor) -> None:
        """Add the product to `summed` (rows, columns) in the matmul's epilogue."""
        a, b = self.factors(*tensors)
        if summed.dtype != a.dtype and _can_write_product_in_dtype(a, summed.dtype):
            torch.addmm(summed, a, b, out_dtype=summed.dtype, out=summed)
        else:
            torch.addmm(summed, a.to(summed.dtype), b.to(summed.dtype), out=summed)


FUSED = {"cuda"}
"""Types of devices on which summands are added without being written; torch has no such products on CPUs."""


@contextmanager
def fuse_gradient_sums_on_meta() -> Iterator[None]:
    """Add meta tensors' gradients as on GPUs, within this context; plans for GPUs use it."""
    FUSED.add("meta")
    try:
        yield
    finally:
        FUSED.discard("meta")


def add_to_grad(weight: Tensor, compute: Compute, *tensors: Tensor) -> Tensor | None:
    """
    Add a summand to a leaf's gradient (any shape) if it is `Addable`, and return None; else return it.

    If `.grad` is None or the weight has hooks, it is also returned, in the gradient dtype.
    """
    if not isinstance(compute, Addable) or weight.device.type not in FUSED:
        return compute(*tensors)
    grad: Tensor | None = weight.grad
    if grad is None or not grad.is_contiguous() or _has_hooks(weight):
        return compute.compute_in_dtype(weight.grad_dtype or tensors[0].dtype, *tensors)
    compute.add_to(grad, *tensors)
    return None


def _has_hooks(weight: Tensor) -> bool:
    return bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)


def _can_write_product_in_dtype(a: Tensor, dtype: torch.dtype) -> bool:
    """Return whether torch can write such factors' product in this dtype."""
    return not a.is_cpu and a.dtype in (torch.bfloat16, torch.float16) and dtype == torch.float32


class WeightGradient(Protocol):
    """
    Function that returns a weight's gradient, or defers it or adds it to `.grad` and returns None.

    Deferred tensors live until the gradient is computed. Pass them detached, or they keep the autograd graph alive.
    """

    def __call__(self, compute: Compute, *tensors: Tensor) -> Tensor | None: ...


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
        is_fused = leaf and weight.device.type in FUSED
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
        if not weight.is_leaf or (grad := weight.grad) is None or _has_hooks(weight) or grad.layout != torch.strided:
            return False
        if (total := self.drain_and_return_remaining_grad()) is not None:
            grad += total
        return True


class Recording(ABC):
    """Context manager whose `gradient_function_for` decides how operations within it treat their weights' gradients."""

    # A context manager from a generator function takes four times as long; each microbatch enters one.

    __slots__ = ("_token",)

    @abstractmethod
    def gradient_function_for(self, weight: Tensor) -> WeightGradient:
        """Return the function that a backward pass calls for the weight's gradient (any shape)."""

    def __enter__(self) -> None:
        self._token: Token[Recording | None] = _recording.set(self)

    def __exit__(self, *_: object) -> None:
        _recording.reset(self._token)


_recording: ContextVar[Recording | None] = ContextVar("recording", default=None)


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


class Accumulation(Recording):
    """
    Gradient accumulation: operations within it have one backward pass, which adds gradients to `.grad` at once.

    `torch.autograd.grad` cannot return their weights' gradients: it would return None.
    """

    __slots__ = ()

    def gradient_function_for(self, weight: Tensor) -> WeightGradient:
        """Return the function that adds a summand to a weight's gradient (any shape)."""
        return partial(add_to_grad, weight)


def compute_at_once_if_hooked(function: type[Function]) -> type[Function]:
    """
    Let an autograd Function's nodes compute their weight gradient at once after `grad_fn.register_hook`.

    A hook must see every gradient, so its node defers none. The Function keeps `get_weight_gradient_function`'s result
    as `ctx.weight_gradient`.
    """
    node_class: Any = function._backward_cls

    def register_hook(node: Any, hook: Callable[..., Any]) -> RemovableHandle:
        node.weight_gradient = _compute_at_once
        handle: RemovableHandle = super(node_class, node).register_hook(hook)
        return handle

    node_class.register_hook = register_hook
    return function


def get_weight_gradient_function(weight: Tensor) -> WeightGradient:
    """
    Return the function that an operation's backward pass calls for its weight's gradient (any shape).

    It returns the gradient; inside a Recording, such as a split backward pass, it may defer it or add it to `.grad`.
    """
    if torch.compiler.is_compiling():
        return _compute_at_once  # a compiled backward pass cannot decide at run time
    recording = _recording.get()
    # A weight that is computed from other tensors must pass its gradient on in the same pass.
    if recording is None or not (weight.requires_grad and weight.is_leaf):
        return _compute_at_once
    return recording.gradient_function_for(weight)


def _compute_at_once(compute: Compute, *tensors: Tensor) -> Tensor:
    return compute(*tensors)


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
