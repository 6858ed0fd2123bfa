"""
Weight gradients put off: while a stage goes backward for its inputs alone, operations queue what its weights will need.

An operation asks `weight_gradient_of(weight)` in its forward pass and keeps the answer on its `ctx`; in its backward
pass it calls that answer with the function that computes the weight's gradient, which runs now or is queued. A graph
recorded under a deferral is an ordinary one until somebody goes through it within `putting_off`.

Which deferral a forward pass belongs to is the only ambient state, and it is the calling thread's own. The backward
pass, which on an accelerator runs in autograd's threads, finds it on `ctx`, and a recomputed forward needs none.
"""

from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import Node

Compute = Callable[..., Tensor]
"""Gives a weight's gradient, or a part of it, from the tensors that are handed to it."""


class WeightGradient(Protocol):
    """
    Computes a weight's gradient from tensors now, or puts that off and gives None.

    The tensors are held until then. Give them detached, or they hold the graph that the backward pass goes through.
    """

    def __call__(self, compute: Compute, *tensors: Tensor) -> Tensor | None: ...


class DeferredGrad:
    """A weight's gradient that may wait: its parts, in the order in which operations found what they need for them."""

    __slots__ = ("_waiting", "active", "weight")

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.active = False
        self._waiting: list[tuple[Compute, tuple[Tensor, ...]]] = []

    def __call__(self, compute: Compute, *tensors: Tensor) -> Tensor | None:
        """Compute a part, or let it wait if this is the time to."""
        if not self.active:
            return compute(*tensors)
        self._waiting.append((compute, tensors))
        return None

    def wait(self, compute: Compute, *tensors: Tensor) -> None:
        """Let a part wait."""
        self._waiting.append((compute, tensors))

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def forget(self) -> None:
        """Let go of what waits."""
        self._waiting = []

    def compute(self) -> Tensor:
        """The sum of what waited, each part of which is let go as soon as it has been added."""
        waiting, self._waiting = self._waiting, []
        compute, held = waiting.pop(0)
        total = compute(*held)
        while waiting:
            compute, held = waiting.pop(0)
            total = total + compute(*held)
        return total


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
        """While this lasts, backward passes put off the gradients of known weights, but not of the spared ones."""
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
        """Where the gradient of a weight waits; from now on the weight is known."""
        if (found := self._put_off.get(id(weight))) is None:
            found = self._put_off[id(weight)] = DeferredGrad(weight)
        return found

    @property
    def known(self) -> Set[int]:
        """The ids of the weights whose gradients operations of the forward pass can put off, as far as it is theirs."""
        return self._put_off.keys()

    def weight_of(self, node: Node) -> Tensor | None:
        """The weight whose gradient this node of an autograd graph can put off for this deferral, if it is one such."""
        answer = getattr(node, "weight_gradient", None)
        return (
            answer.weight
            if isinstance(answer, DeferredGrad) and self._put_off.get(id(answer.weight)) is answer
            else None
        )

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
