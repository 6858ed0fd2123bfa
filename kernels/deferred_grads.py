"""
Deferred weight gradients, for zero bubble: a backward pass for a stage's inputs queues what weight gradients need.

An operation calls `weight_gradient_of(weight)` in its forward pass and keeps the result on its `ctx`; in its backward
pass it calls that with the function that computes the weight's gradient, which then runs at once or is queued. A graph
recorded under a deferral is an ordinary one, except for backward passes within `defer`.

Queued tensors are held, not copied. If one is changed in place before its gradient is computed, its version counter
tells, as it does for tensors that autograd saves.

The deferral that a forward pass records to is the only ambient state, a context variable of the calling thread. The
backward pass, which on an accelerator runs in autograd's threads, reads it from `ctx`; a recomputed forward needs none.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils.hooks import RemovableHandle

Compute = Callable[..., Tensor]
"""Computes a weight's gradient, or one summand of it, from tensors."""


class WeightGradient(Protocol):
    """
    Computes a weight's gradient from tensors and returns it, or defers that and returns None.

    Deferred tensors are held until the gradient is computed. Pass them detached, or they hold the autograd graph.
    """

    def __call__(self, compute: Compute, *tensors: Tensor) -> Tensor | None: ...


class ChangedInPlaceError(RuntimeError):
    """A tensor that a deferred weight gradient needs has been changed in place."""


class DeferredGrad:
    """A weight's gradient that can be deferred: a queue of its summands, in the order of the backward pass."""

    __slots__ = ("_pending", "active", "weight")

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.active = False
        self._pending: list[tuple[Compute, tuple[Tensor, ...], list[int]]] = []

    def __call__(self, compute: Compute, *tensors: Tensor) -> Tensor | None:
        """Compute a summand (the weight's shape), or queue it and return None while deferral is active."""
        if not self.active:
            return compute(*tensors)
        self.queue(compute, *tensors)
        return None

    def queue(self, compute: Compute, *tensors: Tensor) -> None:
        """Queue a summand; `tensors` of any shapes are held until it is computed."""
        self._pending.append((compute, tensors, [tensor._version for tensor in tensors]))

    def add(self, part: Tensor | None) -> None:
        """Queue a summand that is computed already (any shape, the weight's); None queues nothing."""
        if part is not None:
            self.queue(_identity, part)

    def __bool__(self) -> bool:
        return bool(self._pending)

    def clear(self) -> None:
        """Drop what is queued, and the tensors that it holds."""
        self._pending = []

    def compute(self) -> Tensor:
        """
        Compute the queued summands and return their sum (any shape, the weight's); empties the queue.

        Raises ChangedInPlaceError if a queued tensor was changed in place.
        """
        # Each summand is released before the next is computed, so that few exist at a time.
        total = self._first()
        while self._pending:
            total = total + self._first()
        return total

    def _first(self) -> Tensor:
        """Remove the first summand from the queue and compute it, in the dtype in which gradients are summed."""
        compute, tensors, versions = self._pending.pop(0)
        if versions != [tensor._version for tensor in tensors]:
            raise ChangedInPlaceError(_changed_message(tensors, versions, self.weight))
        summand = compute(*tensors)
        # A weight that is a view (a transpose) is no leaf; autograd casts its gradient when it reaches the leaf.
        return summand.to(dtype=self.weight.grad_dtype) if self.weight.is_leaf else summand


class Deferral:
    """The deferrable weight gradients of one forward pass, and what its backward pass has queued."""

    __slots__ = ("_grads",)

    def __init__(self) -> None:
        self._grads: dict[int, DeferredGrad] = {}  # by the weight's id: the hash of a tensor is slow

    def recording(self) -> "_Recording":
        """A context manager: operations that run within it record to this deferral."""
        return _Recording(self)

    @contextmanager
    def defer(self, except_for: Iterable[Tensor] = ()) -> Iterator[None]:
        """Within this context, backward passes defer gradients of recorded weights (any shape) but those excepted."""
        ids = set(map(id, except_for))
        deferred = [each for key, each in self._grads.items() if key not in ids]
        for each in deferred:
            each.active = True
        try:
            yield
        finally:
            for each in deferred:
                each.active = False

    def grad_for(self, weight: Tensor) -> DeferredGrad:
        """The deferrable gradient of a weight (any shape)."""
        if (found := self._grads.get(id(weight))) is None:
            found = self._grads[id(weight)] = DeferredGrad(weight)
        return found

    def take(self) -> list[DeferredGrad]:
        """Remove and return the gradients that have something queued."""
        deferred, self._grads = self._grads, {}
        return [each for each in deferred.values() if each]


_deferral: ContextVar[Deferral | None] = ContextVar("deferral", default=None)


class _Recording:
    """The context of `recording`."""

    # A class, because a context manager made of a generator takes four times as long; each microbatch enters one.

    __slots__ = ("_deferral", "_token")

    def __init__(self, deferral: Deferral) -> None:
        self._deferral = deferral

    def __enter__(self) -> None:
        self._token: Token[Deferral | None] = _deferral.set(self._deferral)

    def __exit__(self, *_: object) -> None:
        _deferral.reset(self._token)


def deferring(function: type[Function]) -> type[Function]:
    """
    Decorator of an autograd Function that keeps the result of `weight_gradient_of` as `ctx.weight_gradient`.

    A hook on its node (`grad_fn.register_hook`) sees every gradient, the weight's too, so a hooked node defers none.
    """
    node_class: Any = function._backward_cls

    def register_hook(node: Any, hook: Callable[..., Any]) -> RemovableHandle:
        node.weight_gradient = _now
        handle: RemovableHandle = super(node_class, node).register_hook(hook)
        return handle

    node_class.register_hook = register_hook
    return function


def weight_gradient_of(weight: Tensor) -> WeightGradient:
    """What an operation calls in its backward pass to compute the gradient of this weight (any shape, any dtype)."""
    if torch.compiler.is_compiling():
        return _now  # the compiled backward has no place for a decision at run time
    deferral = _deferral.get()
    # A weight that is computed from others must pass its gradient on in the same pass.
    if deferral is None or not (weight.requires_grad and weight.is_leaf):
        return _now
    return deferral.grad_for(weight)


def _now(compute: Compute, *tensors: Tensor) -> Tensor:
    return compute(*tensors)


def _identity(part: Tensor) -> Tensor:
    return part


def _changed_message(tensors: tuple[Tensor, ...], versions: list[int], weight: Tensor) -> str:
    tensor = next(each for each, version in zip(tensors, versions, strict=True) if each._version != version)
    changed, learning = (f"{str(each.dtype).removeprefix('torch.')} {tuple(each.shape)}" for each in (tensor, weight))
    return (
        f"a tensor {changed} that the deferred gradient of a weight {learning} needs was changed in place; change a "
        "copy instead (in a custom backward `grad * 2`, not `grad.mul_(2)`)"
    )
