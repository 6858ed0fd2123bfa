"""
Marks of operations for activation checkpointing: results that are cheap to recompute, and arguments that may be kept
in 8 bits. A pass that recomputes such operations has an active `CallRecorder`; any other pass ignores the marks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor

_repeating: ContextVar[bool] = ContextVar("repeating", default=False)


def is_recomputing() -> bool:
    """Return whether a call is repeated in this thread, or torch's engine runs, where checkpoints recompute."""
    return _repeating.get() or torch._C._current_graph_task_id() != -1


@contextmanager
def mark_as_recomputation() -> Iterator[None]:
    """Let `is_recomputing` return True inside the context, for passes that were counted before."""
    token = _repeating.set(True)
    try:
        yield
    finally:
        _repeating.reset(token)


kept_results: ContextVar[list[Any] | None] = ContextVar("kept_results", default=None)
"""Results that a running call keeps for its repetition, in which the list is the same; None in all other calls."""


@contextmanager
def keep_results(kept: list[Any]) -> Iterator[None]:
    """Set `kept_results` inside the context."""
    token = kept_results.set(kept)
    try:
        yield
    finally:
        kept_results.reset(token)


class RowKernels(Protocol):
    """Casts of rows to 8-bit elements with power-of-two scales, float32 (rows,), and back."""

    def quantize_rows(self, x: Tensor, transposed: bool) -> Any:
        """Return elements (rows, width) and scales (rows,) as `data` and `scale`, for x (rows, width)."""

    def dequantize_rows(self, data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Return elements times scales, (rows, width)."""


class CallRecorder(ABC):
    """Context manager for a forward pass; marked operations within it are recorded for the backward pass."""

    __slots__ = ()

    @abstractmethod
    def record_recomputable_call(self, results: Any, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
        """Remember the call behind these results for the backward pass."""

    def round_arguments(
        self, load_kernels: Callable[[], RowKernels], arguments: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]
    ) -> AbstractContextManager[None]:
        """Return a context that keeps arguments of an operation, and saved tensors with these shapes, in 8 bits."""
        return nullcontext()

    def keep_rounded(self) -> AbstractContextManager[None]:
        """Return a context in which saved tensors may be recomputed from rounded arguments."""
        return nullcontext()


recorder: ContextVar[CallRecorder | None] = ContextVar("recorder", default=None)
"""The active recorder, entered by a policy."""


def _find_recorder() -> CallRecorder | None:
    return None if torch.compiler.is_compiling() else recorder.get()


def call_recomputable(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call an operation, and mark its results for `Selective` to drop and recompute: it is quick for their memory."""
    results = function(*arguments)
    record_recomputable_call(results, function, *arguments)
    return results


def call_recomputable_in_autograd_function(function: Callable[..., Any], *arguments: Any) -> Any:
    """Like `call_recomputable`, but always record: in an autograd Function no tensor requires a gradient."""
    results = function(*arguments)
    if (active := recorder.get()) is not None:
        active.record_recomputable_call(results, function, arguments)
    return results


def record_recomputable_call(results: Any, function: Callable[..., Any], *arguments: Any) -> None:
    """Pass a function call's results, a tensor or a tuple of tensors, to the active `Selective`, if any."""
    if (active := _find_recorder()) is None:
        return
    values = *(results if isinstance(results, tuple) else (results,)), *arguments
    # Rounded inputs require no gradient, and are saved for the gradients of other tensors.
    if any(isinstance(value, Tensor) and value.requires_grad for value in values):
        active.record_recomputable_call(results, function, arguments)


def keep_arguments_in_8_bits(
    load_kernels: Callable[[], RowKernels], *arguments: Tensor, shape: Sequence[int] = ()
) -> AbstractContextManager[None]:
    """
    Return a context in which `Quantized` keeps tensors of a norm or gate in 8 bits: `arguments` (..., width), and saved
    results with an argument's shape or with `shape`.

    The operation's `record_recomputable_call` belongs inside, too. Without `Quantized`, the context does nothing, and
    `load_kernels` is not called.
    """
    if (active := _find_recorder()) is None:
        return nullcontext()
    shapes = [tuple(shape), *(tuple(argument.shape) for argument in arguments)]
    return active.round_arguments(load_kernels, arguments, shapes)


def accept_rounded_inputs() -> AbstractContextManager[None]:
    """Return a context for products that save inputs only for weight gradients: `Quantized` may round them."""
    return nullcontext() if (active := _find_recorder()) is None else active.keep_rounded()
