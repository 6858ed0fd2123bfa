"""
Weight gradients that autograd does not add: those that are deferred, and those that are added while they are computed.

Deferral is for zero bubble: a backward pass for a stage's inputs queues what weight gradients need.

An operation calls `weight_gradient_of(weight)` in its forward pass and keeps the result on its `ctx`; in its backward
pass it calls that with the function that computes the weight's gradient, which then runs at once or is queued. A graph
recorded under a deferral is an ordinary one, except for backward passes within `defer`.

Queued tensors are held, not copied. If one is changed in place before its gradient is computed, its version counter
tells, as it does for tensors that autograd saves.

A full backward pass of what ran within an `Accumulation` adds summands that are `Addable`, such as a linear layer's
weight gradient, to the `.grad` of the weight while they are computed, in the dtype of that sum. Autograd would write a
product in the weight's dtype, cast it, and add it: with bfloat16 weights and float32 gradients 20 bytes an element, not
8.

What a forward pass records to is the only ambient state, a context variable of the calling thread. The backward pass,
which on an accelerator runs in autograd's threads, reads it from `ctx`; a recomputed forward needs none.
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
"""Computes a weight's gradient, or one summand of it, from tensors."""


class Addable(ABC):
    """A `Compute` that can add its summand to a sum without writing it first, in the sum's dtype."""

    @abstractmethod
    def __call__(self, *tensors: Tensor) -> Tensor:
        """The summand (the weight's shape), in the dtype of what it is computed from."""

    @abstractmethod
    def in_dtype(self, dtype: torch.dtype, *tensors: Tensor) -> Tensor:
        """The summand (the weight's shape) in a dtype that is at least as wide."""

    @abstractmethod
    def add_to(self, summed: Tensor, *tensors: Tensor) -> None:
        """Add the summand to a contiguous tensor of its shape, of a dtype that is at least as wide."""


@dataclass(frozen=True)
class MatrixProduct(Addable):
    """A summand (rows, columns) that is the matrix product of two `factors` made from the tensors."""

    factors: Callable[..., tuple[Tensor, Tensor]]

    def __call__(self, *tensors: Tensor) -> Tensor:
        """The product (rows, columns) in the dtype of the factors."""
        return torch.mm(*self.factors(*tensors))

    def in_dtype(self, dtype: torch.dtype, *tensors: Tensor) -> Tensor:
        """The product (rows, columns) in a dtype."""
        a, b = self.factors(*tensors)
        if dtype != a.dtype and _has_wide_product(a, dtype):
            return torch.mm(a, b, out_dtype=dtype)
        return torch.mm(a.to(dtype), b.to(dtype))

    def add_to(self, summed: Tensor, *tensors: Tensor) -> None:
        """summed (rows, columns) += the product, in its epilogue."""
        a, b = self.factors(*tensors)
        if summed.dtype != a.dtype and _has_wide_product(a, summed.dtype):
            torch.addmm(summed, a, b, out_dtype=summed.dtype, out=summed)
        else:
            torch.addmm(summed, a.to(summed.dtype), b.to(summed.dtype), out=summed)


FUSED = {"cuda"}
"""Types of devices on which summands are added without being written: on a CPU torch's products have no such dtype."""


@contextmanager
def fused_on_meta() -> Iterator[None]:
    """A context in which meta tensors are added up as on GPUs, for those who count what a GPU would do."""
    FUSED.add("meta")
    try:
        yield
    finally:
        FUSED.discard("meta")


def add_to_grad(weight: Tensor, compute: Compute, *tensors: Tensor) -> Tensor | None:
    """
    Add a summand to the gradient of a leaf of any shape if it is `Addable`, and return None; else return it.

    It is returned, too, where `.grad` is None and where hooks of the weight wait for it, in the dtype in which
    gradients are summed.
    """
    if not isinstance(compute, Addable) or weight.device.type not in FUSED:
        return compute(*tensors)
    grad: Tensor | None = weight.grad
    if grad is None or not grad.is_contiguous() or _has_hooks(weight):
        return compute.in_dtype(weight.grad_dtype or tensors[0].dtype, *tensors)
    compute.add_to(grad, *tensors)
    return None


def _has_hooks(weight: Tensor) -> bool:
    return bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)


def _has_wide_product(a: Tensor, dtype: torch.dtype) -> bool:
    """Whether torch multiplies such factors into a result of this dtype."""
    return not a.is_cpu and a.dtype in (torch.bfloat16, torch.float16) and dtype == torch.float32


class WeightGradient(Protocol):
    """
    Computes a weight's gradient from tensors and returns it, or defers that or adds it by itself, and returns None.

    Deferred tensors are held until the gradient is computed. Pass them detached, or they hold the autograd graph.
    """

    def __call__(self, compute: Compute, *tensors: Tensor) -> Tensor | None: ...


class ChangedInPlaceError(RuntimeError):
    """A tensor that a deferred weight gradient needs has been changed in place."""


Held = tuple[tuple[Tensor, ...], list[int]]
"""Tensors and the versions that they have to have when they are used."""


def hold(*tensors: Tensor) -> Held:
    """Tensors (any shapes) with their present versions."""
    return tensors, [tensor._version for tensor in tensors]


class DeferredGrad:
    """A weight's gradient that can be deferred: a queue of its summands, in the order of the backward pass."""

    __slots__ = ("_pending", "active", "weight")

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.active = False
        self._pending: list[tuple[Compute, Held]] = []

    def __call__(self, compute: Compute, *tensors: Tensor) -> Tensor | None:
        """Compute a summand (the weight's shape), or queue it and return None while deferral is active."""
        if not self.active:
            return compute(*tensors)
        self.queue(compute, *tensors)
        return None

    def queue(self, compute: Compute, *tensors: Tensor) -> None:
        """Queue a summand; `tensors` of any shapes are held until it is computed."""
        self._pending.append((compute, hold(*tensors)))

    def queue_held(self, compute: Compute, held: Held) -> None:
        """Queue a summand of tensors that others may share."""
        self._pending.append((compute, held))

    def add(self, part: Tensor | None) -> None:
        """Queue a summand that is computed already (any shape, the weight's); None queues nothing."""
        if part is not None:
            self.queue(_identity, part)

    def __bool__(self) -> bool:
        return bool(self._pending)

    def clear(self) -> None:
        """Drop what is queued, and the tensors that it holds."""
        self._pending = []

    def compute(self) -> Tensor | None:
        """
        Compute the queued summands and return the sum (any shape, the weight's) of those that are not added already.

        Empties the queue.

        Raises ChangedInPlaceError if a queued tensor was changed in place.
        """
        weight, pending = self.weight, self._pending
        # A weight that is a view (a transpose) is no leaf; autograd casts its gradient when it reaches the leaf.
        leaf, grad = weight.is_leaf, weight.grad if weight.is_leaf else None
        fused = leaf and weight.device.type in FUSED
        total: Tensor | None = None
        # Each summand is released before the next is computed, so that few exist at a time.
        while pending:
            compute, (tensors, versions) = pending.pop(0)
            if versions != [tensor._version for tensor in tensors]:
                raise ChangedInPlaceError(_changed_message(tensors, versions, weight))
            summand = add_to_grad(weight, compute, *tensors) if fused else compute(*tensors)
            if summand is None:
                continue
            if leaf and (grad is None or grad.dtype != summand.dtype):
                summand = summand.to(dtype=weight.grad_dtype)
            total = summand if total is None else total + summand
        return total

    def add_to_grad(self) -> bool:
        """
        Add the queued summands to the weight's `.grad` in place; False if that is left to autograd, and nothing done.

        It is left for a weight that has no `.grad` yet, has hooks, or is no leaf. Autograd would add the same sum, but
        takes more time to start than small layers have.
        """
        weight = self.weight
        if not weight.is_leaf or (grad := weight.grad) is None or _has_hooks(weight) or grad.layout != torch.strided:
            return False
        if (total := self.compute()) is not None:
            grad += total
        return True


class Recording(ABC):
    """A context manager: what an operation within it does with its weight's gradient is for `grad_for` to say."""

    # A class, because a context manager made of a generator takes four times as long; each microbatch enters one.

    __slots__ = ("_token",)

    @abstractmethod
    def grad_for(self, weight: Tensor) -> WeightGradient:
        """What computes the gradient of a weight (any shape)."""

    def __enter__(self) -> None:
        self._token: Token[Recording | None] = _recording.set(self)

    def __exit__(self, *_: object) -> None:
        _recording.reset(self._token)


_recording: ContextVar[Recording | None] = ContextVar("recording", default=None)


class Deferral(Recording):
    """
    The deferrable weight gradients of one forward pass, and what its backward pass has queued.

    Operations that run within it record to it.
    """

    __slots__ = ("_grads",)

    def __init__(self) -> None:
        self._grads: dict[int, DeferredGrad] = {}  # by the weight's id: the hash of a tensor is slow

    def defer(self, except_for: Iterable[Tensor] = ()) -> "_Deferring":
        """A context manager: backward passes defer gradients of recorded weights (any shape) but those excepted."""
        ids = set(map(id, except_for))
        return _Deferring([each for key, each in self._grads.items() if key not in ids])

    def grad_for(self, weight: Tensor) -> DeferredGrad:
        """The deferrable gradient of a weight (any shape)."""
        if (found := self._grads.get(id(weight))) is None:
            found = self._grads[id(weight)] = DeferredGrad(weight)
        return found

    def take(self) -> list[DeferredGrad]:
        """Remove and return the gradients that have something queued."""
        deferred, self._grads = self._grads, {}
        return [each for each in deferred.values() if each._pending]


class _Deferring:
    """The context of `defer`."""

    __slots__ = ("_deferred",)

    def __init__(self, deferred: Sequence[DeferredGrad]) -> None:
        self._deferred = deferred

    def __enter__(self) -> None:
        for each in self._deferred:
            each.active = True

    def __exit__(self, *_: object) -> None:
        for each in self._deferred:
            each.active = False


class Accumulation(Recording):
    """
    What runs within it has one full backward pass, which adds gradients to `.grad` when they are computed.

    `torch.autograd.grad` would return None for weights whose gradients it is to return.
    """

    __slots__ = ()

    def grad_for(self, weight: Tensor) -> WeightGradient:
        """What adds a summand to the gradient of a weight (any shape)."""
        return partial(add_to_grad, weight)


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
    recording = _recording.get()
    # A weight that is computed from others must pass its gradient on in the same pass.
    if recording is None or not (weight.requires_grad and weight.is_leaf):
        return _now
    return recording.grad_for(weight)


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
