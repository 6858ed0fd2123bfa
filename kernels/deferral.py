"""
Weight gradients put off: while a stage goes backward for its inputs alone, operations queue what its weights will need.

An operation asks `weight_gradient_of(weight)` in its forward pass and keeps the answer on its `ctx`; in its backward
pass it calls that answer with the function that computes the weight's gradient, which runs now or is queued. A graph
recorded under a deferral is an ordinary one until somebody goes through it within `putting_off`.

Which deferral a forward pass belongs to is the only ambient state, and it is the calling thread's own. The backward
pass, which on an accelerator runs in autograd's threads, finds it on `ctx`, and a recomputed forward needs none.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from functools import partial
from typing import Protocol

from torch import Tensor

Compute = Callable[..., Tensor]
"""Gives a weight's gradient from the tensors that are handed to it."""


class WeightGradient(Protocol):
    """Computes a weight's gradient from tensors now, or puts that off and gives None."""

    def __call__(self, compute: Compute, *tensors: Tensor) -> Tensor | None: ...


class Deferral:
    """
    The weight gradients that one forward pass put off.

    Queued gradients hold the tensors that they are computed from (detached), until `take` hands them out.
    """

    __slots__ = ("_queued", "_spared", "known")

    def __init__(self) -> None:
        self.known: set[Tensor] = set()
        """The weights whose operations know how to put their gradients off."""
        self._queued: dict[Tensor, list[Callable[[], Tensor]]] = {}
        self._spared: Collection[Tensor] | None = None

    def recording(self) -> "_Recording":
        """A context: what runs in it belongs to this deferral."""
        return _Recording(self)

    @contextmanager
    def putting_off(self, spared: Collection[Tensor]) -> Iterator[None]:
        """While this lasts, backward passes queue the gradients of known weights, but not of the spared ones."""
        self._spared = spared
        try:
            yield
        finally:
            self._spared = None

    def puts_off(self, weight: Tensor) -> bool:
        """Whether the gradient of a weight is to be queued at this moment."""
        return self._spared is not None and weight not in self._spared

    def queue(self, weight: Tensor, compute: Callable[[], Tensor]) -> None:
        """Add a contribution to the gradient of a weight."""
        self._queued.setdefault(weight, []).append(compute)

    def take(self) -> dict[Tensor, list[Callable[[], Tensor]]]:
        """The contributions to each weight's gradient, in the order in which they came; they are held here no more."""
        queued, self._queued = self._queued, {}
        return queued


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


def weight_gradient_of(weight: Tensor) -> WeightGradient:
    """How the operation that is asked for in this forward pass shall compute the gradient of this weight."""
    deferral = _deferral.get()
    if deferral is None or not (weight.requires_grad and weight.is_leaf):
        return _now
    deferral.known.add(weight)
    return _NowOrLater(deferral, weight)


def _now(compute: Compute, *tensors: Tensor) -> Tensor:
    return compute(*tensors)


class _NowOrLater:
    """Computes or queues, as the deferral says when the backward pass comes."""

    __slots__ = ("_deferral", "_weight")

    def __init__(self, deferral: Deferral, weight: Tensor) -> None:
        self._deferral = deferral
        self._weight = weight

    def __call__(self, compute: Compute, *tensors: Tensor) -> Tensor | None:
        if not self._deferral.puts_off(self._weight):
            return compute(*tensors)
        # Attached, they would keep the graph that the pass has just gone through.
        self._deferral.queue(self._weight, partial(compute, *(tensor.detach() for tensor in tensors)))
        return None
