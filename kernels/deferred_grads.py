"""
Weight gradients that autograd does not add: they are deferred, or added to `.grad` while they are computed.

Deferral serves zero-bubble schedules (`deferral.py`).

An operation calls `get_weight_gradient_function(weight)` in its forward pass and keeps the result on its `ctx`. Its
backward pass calls the result with the function that computes the weight's gradient, which then runs at once or is
queued. A graph recorded under a deferral is an ordinary graph, except for backward passes within `defer`.

Gradient accumulation: operations that ran within an `Accumulation` add `Addable` gradients, such as a linear layer's,
to the weight's `.grad` while computing them, in the dtype of `.grad`. Autograd would write a product in the weight's
dtype, cast it, and add it: with bfloat16 weights and float32 gradients that moves 20 bytes per element instead of 8.

The forward pass's recording is the only ambient state, a context variable in the calling thread. The backward pass (on
an accelerator, in autograd's threads) reads it from `ctx`; a recomputed forward pass needs none.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
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
    if grad is None or not grad.is_contiguous() or has_hooks(weight):
        return compute.compute_in_dtype(weight.grad_dtype or tensors[0].dtype, *tensors)
    compute.add_to(grad, *tensors)
    return None


def has_hooks(weight: Tensor) -> bool:
    """Return whether a weight's gradient has hooks."""
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
