"""
Tensors that a backward pass computes again, instead of keeping them since the forward pass.

`rerun` keeps the arguments of a call alone, such as those of a block, and repeats the call when the backward pass needs
the first tensor that it saved (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174).
Within `Selective` each result of a `cheap` operation, such as a norm or a gate, is computed again from the operation's
arguments, which it saves for itself anyway; everything else is kept (Korthikanti et al. 2022, "Reducing Activation
Recomputation", arXiv 2205.05198, section 5).

torch.utils.checkpoint gives each recomputed tensor out once, so that the weight gradients of torch's matmuls can't be
deferred, and chooses among operations in torch's dispatcher, past which our kernels are launched. Here autograd holds a
`Saved` in place of each tensor, which may be read any number of times.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextvars import ContextVar, Token
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import Node, saved_tensors_hooks

LEAF: type[Node] = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
TRANSPOSE: type[Node] = torch._C._functions.TBackward0  # type: ignore[attr-defined]


class Saved(ABC):
    """What autograd holds in place of a tensor that it saves."""

    __slots__ = ("__weakref__",)

    @abstractmethod
    def value(self) -> Tensor:
        """The tensor (any shape), without a graph."""


def saved_value(saved: Saved) -> Tensor:
    """The hook by which autograd gets its tensor (any shape) back."""
    return saved.value()


def held_by(variable: Any) -> Saved | None:
    """What is held in place of a saved tensor, a node's `_raw_saved_<name>`; None if other hooks hold it, or none."""
    return variable.data if variable.unpack_hook is saved_value else None


class Kept(Saved):
    """A tensor that is kept: its memory is shared, and not changed in place until it is read."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()
        self._version = tensor._version

    def value(self) -> Tensor:
        """The tensor, of any shape and dtype; RuntimeError if it was changed in place."""
        # torch leaves this to hooks, where there are any.
        if self._tensor._version != self._version:
            what = f"{str(self._tensor.dtype).removeprefix('torch.')} {tuple(self._tensor.shape)}"
            raise RuntimeError(
                f"a tensor {what} that the backward pass needs was changed in place after the forward pass; change a "
                "copy instead"
            )
        return self._tensor


class _Repeatable(ABC):
    """A call that can be repeated, and the tensors that it makes: those that somebody still holds get their values."""

    __slots__ = ("parts",)

    def __init__(self) -> None:
        self.parts: list[ref[_Part] | None] = []

    def add(self, tensor: Tensor) -> "_Part":
        """The next tensor that the call makes (any shape)."""
        part = _Part(self, tensor)
        self.parts.append(ref(part))
        return part

    def fill(self, number: int, tensor: Tensor) -> None:
        """Take the value of the part of this number; RuntimeError if it is another one than at first."""
        weak = self.parts[number]
        part = None if weak is None else weak()
        if part is None:
            return
        if part.layout != _layout(tensor):
            raise RuntimeError(
                f"recomputation gave a tensor {_words(_layout(tensor))} where the forward pass had "
                f"{_words(part.layout)}: what is recomputed must do the same each time, so check for branches that "
                "depend on something that has changed"
            )
        part.filled = tensor.detach()

    @abstractmethod
    def repeat(self) -> None:
        """Repeat the call, and fill the parts."""


class _Part(Saved):
    """A tensor that a repeated call makes; its value lives until autograd releases it."""

    __slots__ = ("call", "filled", "layout")

    def __init__(self, call: _Repeatable, tensor: Tensor) -> None:
        self.call = call
        self.layout = _layout(tensor)
        self.filled: Tensor | None = None

    def value(self) -> Tensor:
        """The tensor; the first of a call's that is asked for repeats it."""
        if self.filled is None:
            self.call.repeat()
        assert self.filled is not None
        return self.filled


Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]


def _layout(tensor: Tensor) -> Layout:
    return tensor.shape, tensor.stride(), tensor.dtype


def _words(layout: Layout) -> str:
    shape, strides, dtype = layout
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)} of strides {strides}"


def rerun(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """
    The function's results; for the backward pass only tensors among the arguments are kept, and weights.

    The function runs again in the backward pass, up to the last tensor that it saves, with the same random numbers and
    the same autocast.
    """
    call = _Rerun(function, arguments, named)
    with saved_tensors_hooks(call.pack, saved_value):
        return function(*arguments, **named)


_repeating: ContextVar[bool] = ContextVar("repeating", default=False)


def is_recomputing() -> bool:
    """Whether a call is repeated in this thread, or torch's engine goes backward, where checkpoints repeat theirs."""
    return _repeating.get() or torch._C._current_graph_task_id() != -1


class _Rerun(_Repeatable):
    """A call of a function, whose saved tensors are its parts."""

    __slots__ = ("_arguments", "_autocast", "_function", "_named", "_random")

    def __init__(self, function: Callable[..., Any], arguments: Sequence[Any], named: dict[str, Any]) -> None:
        super().__init__()
        # The meta device has neither autocast nor random numbers.
        devices = (each.device for each in arguments if isinstance(each, Tensor) and not each.is_meta)
        device = next(devices, torch.device("cpu"))
        self._function = function
        self._arguments = [_argument(each) for each in arguments]
        self._named = {name: _argument(each) for name, each in named.items()}
        self._autocast = _Autocast(device.type)
        self._random = _RandomState(device)

    def pack(self, tensor: Tensor) -> Saved:
        """Keep a weight, which takes no memory of its own; of any other tensor (any shape) only the place."""
        if _is_weight(tensor) or tensor.layout != torch.strided:
            self.parts.append(None)
            return Kept(tensor)
        return self.add(tensor)

    def repeat(self) -> None:
        number = -1

        def take(tensor: Tensor) -> Tensor:
            nonlocal number
            number += 1
            self.fill(number, tensor)
            if number == len(self.parts) - 1:
                raise _Enough
            return tensor.detach()

        arguments = [_restored(each) for each in self._arguments]
        named = {name: _restored(each) for name, each in self._named.items()}
        now = _RandomState(self._random.device)
        self._random.restore()
        before = _repeating.set(True)
        try:
            with saved_tensors_hooks(take, _same), self._autocast.context(), torch.enable_grad():
                self._function(*arguments, **named)
        except _Enough:
            return
        finally:
            _repeating.reset(before)
            now.restore()
        raise RuntimeError(
            f"the forward pass saved {len(self.parts)} tensors, and its recomputation {number + 1}: what is recomputed "
            "must do the same each time"
        )


class _Enough(Exception):
    """All tensors have been recomputed, so that the rest of the function need not run."""


def _same(tensor: Tensor) -> Tensor:
    return tensor


class _Argument:
    """A tensor among the arguments of a call."""

    __slots__ = ("_kept", "_requires_grad")

    def __init__(self, tensor: Tensor) -> None:
        self._kept = Kept(tensor)
        self._requires_grad = tensor.requires_grad

    def restored(self) -> Tensor:
        """The tensor (any shape) as the start of another graph."""
        return self._kept.value().detach().requires_grad_(self._requires_grad)


def _argument(value: Any) -> Any:
    return _Argument(value) if isinstance(value, Tensor) else value


def _restored(kept: Any) -> Any:
    return kept.restored() if isinstance(kept, _Argument) else kept


def _is_weight(tensor: Tensor) -> bool:
    """Whether a saved tensor (any shape) is a trained leaf, or its transpose."""
    if tensor.is_leaf:
        return tensor.requires_grad
    node: Any = tensor.grad_fn
    return type(node) is TRANSPOSE and type(node.next_functions[0][0]) is LEAF


class _RandomState:
    """The states of torch's default generators, of the CPU and of a GPU."""

    __slots__ = ("_cpu", "_cuda", "device")

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cpu = torch.get_rng_state()
        # A CUDA graph that draws numbers draws new ones with each launch, so that their state is of no use.
        drawn = device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
        self._cuda = torch.cuda.get_rng_state(device) if drawn else None

    def restore(self) -> None:
        """Set the generators back."""
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self.device)


class _Autocast:
    """The autocast that a function runs in. drawloom has none, but a transform may."""

    __slots__ = ("_options",)

    def __init__(self, kind: str) -> None:
        self._options: dict[str, Any] = {
            "device_type": kind,
            "enabled": torch.is_autocast_enabled(kind),
            "dtype": torch.get_autocast_dtype(kind),
        }

    def context(self) -> torch.autocast:
        """A context like it."""
        return torch.autocast(**self._options)


def cheap(function: Callable[..., Any], *arguments: Any) -> Any:
    """The results of an operation that costs so little, and so much memory, that `Selective` repeats it."""
    results = function(*arguments)
    note(results, function, *arguments)
    return results


def note(results: Any, function: Callable[..., Any], *arguments: Any) -> None:
    """Say that a call of this function would give these results: a tensor, or a tuple of them."""
    if not torch.compiler.is_compiling() and (selective := _selective.get()) is not None:
        selective.note(results, function, arguments)


class Selective:
    """
    A context manager: what runs within it keeps no results of cheap operations for the backward pass.

    A saved tensor is known by its address, as long as the result that it shares memory with lives.
    """

    __slots__ = ("_hooks", "_results", "_token")

    def __init__(self) -> None:
        self._results: dict[int, tuple[ref[Tensor], int]] = {}
        self._hooks = saved_tensors_hooks(self._pack, saved_value)

    def __enter__(self) -> None:
        self._token: Token[Selective | None] = _selective.set(self)
        self._hooks.__enter__()

    def __exit__(self, *_: object) -> None:
        self._hooks.__exit__()
        _selective.reset(self._token)

    def note(self, results: Any, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
        """Remember how these results are made."""
        each = results if isinstance(results, tuple) else (results,)
        if not any(result.requires_grad for result in each):
            return
        call = _Repeated(function, [self._pack(value) if isinstance(value, Tensor) else value for value in arguments])
        for result in each:
            # The part lives as long as its result, or as autograd holds it.
            result.recomputed = call.add(result)
            if result.is_contiguous() and (address := _address(result)):
                self._results[address] = ref(result), result._version

    def _pack(self, tensor: Tensor) -> Saved:
        weak, version = self._results.get(_address(tensor), (_nothing, 0))
        result: Any = weak()
        if result is None or result._version != version or tensor.dtype != result.dtype:
            return Kept(tensor)
        # What has the result's address is a view of it, or of something larger that it is the beginning of.
        if _extent(tensor) > result.numel():
            return Kept(tensor)
        return result.recomputed if _layout(tensor) == _layout(result) else _View(result.recomputed, tensor)


_selective: ContextVar[Selective | None] = ContextVar("selective", default=None)


def _nothing() -> None:
    return None


def _address(tensor: Tensor) -> int:
    """Where a tensor (any shape) begins in memory; 0 without elements."""
    if tensor.is_meta:  # without memory; its storage is one all the same, which views share
        return tensor.untyped_storage()._cdata + tensor.storage_offset() if tensor.numel() else 0
    return tensor.data_ptr() if tensor.numel() else 0


def _extent(tensor: Tensor) -> int:
    """How many elements a tensor (any shape) reaches from its first one, in memory."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


class _Repeated(_Repeatable):
    """A call of a cheap operation, whose results are its parts."""

    __slots__ = ("_arguments", "_function")

    def __init__(self, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
        super().__init__()
        self._function = function
        self._arguments = arguments

    def repeat(self) -> None:
        with torch.no_grad():
            arguments = [each.value() if isinstance(each, Saved) else each for each in self._arguments]
            results = self._function(*arguments)
        for number, result in enumerate(results if isinstance(results, tuple) else (results,)):
            self.fill(number, result)


class _View(Saved):
    """A view of a result, from its first element."""

    __slots__ = ("_part", "_shape", "_strides")

    def __init__(self, part: _Part, view: Tensor) -> None:
        self._part = part
        self._shape, self._strides = view.shape, view.stride()

    def value(self) -> Tensor:
        """The view (any shape)."""
        whole = self._part.value()
        return whole.as_strided(self._shape, self._strides, whole.storage_offset())
