"""
Weight gradients put off: while a stage goes backward for its inputs alone, operations queue what its weights will need.

An operation asks `weight_gradient_of(weight)` in its forward pass and keeps the answer on its `ctx`; in its backward
pass it calls that answer with the function that computes the weight's gradient, which runs now or is queued. A graph
recorded under a deferral is an ordinary one until somebody goes through it within `defer`.

What waits is held, not copied. A tensor that is changed in place meanwhile is noticed by its version, as autograd
notices it of the tensors that it saves.

Which deferral a forward pass belongs to is the only ambient state, and it is the calling thread's own. The backward
pass, which on an accelerator runs in autograd's threads, finds it on `ctx`, and a recomputed forward needs none.
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
"""Gives a weight's gradient, or a part of it, from the tensors that are handed to it."""


class WeightGradient(Protocol):
    """
    Computes a weight's gradient from tensors now, or puts that off and gives None.

    The tensors are held until then. Give them detached, or they hold the graph that the backward pass goes through.
    """

    def __call__(self, compute: Compute, *tensors: Tensor) -> Tensor | None: ...


class ChangedInPlaceError(RuntimeError):
    """A tensor that a weight's gradient waits for is no longer what it was."""


class DeferredGrad:
    """A weight's gradient that may wait: its parts, in the order in which operations found what they need for them."""

    __slots__ = ("_waiting", "active", "weight")

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.active = False
        self._waiting: list[tuple[Compute, tuple[Tensor, ...], list[int]]] = []

    def __call__(self, compute: Compute, *tensors: Tensor) -> Tensor | None:
        """Compute a part, or let it wait if this is the time to."""
        if not self.active:
            return compute(*tensors)
        self.wait(compute, *tensors)
        return None

    def wait(self, compute: Compute, *tensors: Tensor) -> None:
        """Let a part wait."""
        self._waiting.append((compute, tensors, [tensor._version for tensor in tensors]))

    def add(self, part: Tensor | None) -> None:
        """Let a part wait that has been computed; None adds nothing."""
        if part is not None:
            self.wait(_itself, part)

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def forget(self) -> None:
        """Let go of what waits."""
        self._waiting = []

    def compute(self) -> Tensor:
        """
        The sum of what waited, each part of which is let go as soon as it has been added.

        ChangedInPlaceError if a tensor that waited was changed in place.
        """
        total = self._first()
        while self._waiting:
            total = total + self._first()
        return total

    def _first(self) -> Tensor:
        """The first part that waits, which waits no more, in the dtype in which the weight's gradients are summed."""
        compute, tensors, versions = self._waiting.pop(0)
        if versions != [tensor._version for tensor in tensors]:
            raise ChangedInPlaceError(_changed(tensors, versions, self.weight))
        part = compute(*tensors)
        # A weight that is a view (a transpose) is no leaf: what its leaf sums in, autograd sees to afterwards.
        return part.to(dtype=self.weight.grad_dtype) if self.weight.is_leaf else part


class Deferral:
    """The weight gradients that one forward pass can put off, and that one backward pass did."""

    __slots__ = ("_put_off",)

    def __init__(self) -> None:
        self._put_off: dict[int, DeferredGrad] = {}  # by the weight's id: the hash of a tensor is slow

    def recording(self) -> "_Recording":
        """A context: what runs in it belongs to this deferral."""
        return _Recording(self)

    @contextmanager
    def defer(self, except_for: Iterable[Tensor] = ()) -> Iterator[None]:
        """While this lasts, backward passes put off the gradients of recorded weights, `except_for` some."""
        ids = set(map(id, except_for))
        put_off = [each for key, each in self._put_off.items() if key not in ids]
        for each in put_off:
            each.active = True
        try:
            yield
        finally:
            for each in put_off:
                each.active = False

    def of(self, weight: Tensor) -> DeferredGrad:
        """Where the gradient of a weight waits."""
        if (found := self._put_off.get(id(weight))) is None:
            found = self._put_off[id(weight)] = DeferredGrad(weight)
        return found

    def take(self) -> list[DeferredGrad]:
        """What waits, by weight; it is held here no more."""
        put_off, self._put_off = self._put_off, {}
        return [each for each in put_off.values() if each]


_deferral: ContextVar[Deferral | None] = ContextVar("deferral", default=None)


class _Recording:
    """Enters a deferral and leaves it. Written out, for a generator takes four times as long."""

    __slots__ = ("_deferral", "_token")

    def __init__(self, deferral: Deferral) -> None:
        self._deferral = deferral

    def __enter__(self) -> None:
        self._token: Token[Deferral | None] = _deferral.set(self._deferral)

    def __exit__(self, *_: object) -> None:
        _deferral.reset(self._token)


def deferring(function: type[Function]) -> type[Function]:
    """
    Decorates a Function that keeps an answer on its `ctx` as `weight_gradient`.

    A hook on a node of it (`grad_fn.register_hook`) is shown every gradient, the weight's too, which then can't wait.
    """
    node_class: Any = function._backward_cls

    def register_hook(node: Any, hook: Callable[..., Any]) -> RemovableHandle:
        node.weight_gradient = _now
        handle: RemovableHandle = super(node_class, node).register_hook(hook)
        return handle

    node_class.register_hook = register_hook
    return function


def weight_gradient_of(weight: Tensor) -> WeightGradient:
    """How the operation that is asked for in this forward pass shall compute the gradient of this weight."""
    if torch.compiler.is_compiling():
        return _now  # compiled code computes what it was compiled to
    deferral = _deferral.get()
    if deferral is None or not (weight.requires_grad and weight.is_leaf):
        return _now
    return deferral.of(weight)


def _now(compute: Compute, *tensors: Tensor) -> Tensor:
    return compute(*tensors)


def _itself(part: Tensor) -> Tensor:
    return part


def _changed(tensors: tuple[Tensor, ...], versions: list[int], weight: Tensor) -> str:
    tensor = next(each for each, version in zip(tensors, versions, strict=True) if each._version != version)
    changed, learning = (f"{str(each.dtype).removeprefix('torch.')} {tuple(each.shape)}" for each in (tensor, weight))
    return (
        f"a tensor {changed} for which the gradient of a weight {learning} waits was changed in place; change a copy "
        "instead (in a custom backward `grad * 2`, not `grad.mul_(2)`)"
    )
