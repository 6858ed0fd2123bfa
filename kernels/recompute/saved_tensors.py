"""Wrappers saved by autograd instead of tensors, readable any number of times."""

from abc import ABC, abstractmethod
from contextvars import ContextVar, Token
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.nn import Parameter

LEAF: type[Node] = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
TRANSPOSE: type[Node] = torch._C._functions.TBackward0  # type: ignore[attr-defined]


class SavedTensor(ABC):
    """Wrapper saved by autograd instead of a tensor."""

    __slots__ = ("__weakref__",)

    @abstractmethod
    def get_or_recompute(self) -> Tensor:
        """Return the tensor (any shape), without a graph."""

    @property
    def is_unrounded(self) -> bool:
        """Whether `get_or_recompute` returns the forward pass's numbers, and not rounded ones."""
        return True


def unpack(saved: SavedTensor) -> Tensor:
    """Return a wrapper's tensor (any shape): autograd's unpack hook."""
    return saved.get_or_recompute()


def get_wrapper_of_saved_variable(saved_variable: Any) -> SavedTensor | None:
    """
    Return our wrapper around a node's `_raw_saved_<name>`, or None if the tensor was saved by other hooks or none.
    """
    return saved_variable.data if saved_variable.unpack_hook is unpack else None


class KeptTensor(SavedTensor):
    """Wrapper around a kept tensor: it shares memory, which must not change in place until it is read."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()
        self._version = tensor._version
        if (collected := _collected.get()) is not None and not _is_parameter_or_view(tensor):
            collected.append(ref(self))

    def replace(self, tensor: Tensor) -> None:
        """Replace the kept tensor by a copy (same shape, same values) in other memory."""
        self._tensor = tensor
        self._version = tensor._version

    def get_or_recompute(self) -> Tensor:
        """Return the tensor, with any shape and dtype; RuntimeError if it was changed in place."""
        # torch does not check versions of tensors that hooks saved.
        if self._tensor._version != self._version:
            text = f"{str(self._tensor.dtype).removeprefix('torch.')} {tuple(self._tensor.shape)}"
            raise RuntimeError(
                f"a tensor {text} that the backward pass needs was changed in place after the forward pass; change a "
                "copy instead"
            )
        return self._tensor


class Collecting:
    """Context manager for a forward pass, in which `kept` gets all wrappers of kept tensors but parameters."""

    __slots__ = ("_hooks", "_token", "kept")

    def __init__(self) -> None:
        self.kept: list[ref[KeptTensor]] = []
        self._hooks = saved_tensors_hooks(KeptTensor, unpack)

    def __enter__(self) -> "Collecting":
        self._token: Token[list[ref[KeptTensor]] | None] = _collected.set(self.kept)
        self._hooks.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.__exit__()
        _collected.reset(self._token)


_collected: ContextVar[list[ref[KeptTensor]] | None] = ContextVar("collected", default=None)


def _is_parameter_or_view(tensor: Tensor) -> bool:
    """Return whether a tensor (any shape) is a parameter or a view of one."""
    return isinstance(tensor, Parameter) or isinstance(tensor._base, Parameter) or is_trained_leaf_or_transpose(tensor)


class RepeatedCall(ABC):
    """Call that can be repeated to compute its tensors; unreferenced tensors are skipped."""

    __slots__ = ("parts",)

    def __init__(self) -> None:
        self.parts: list[ref[RecomputedTensor] | None] = []

    def add(self, tensor: Tensor) -> "RecomputedTensor":
        """Append a wrapper for the call's next tensor (any shape)."""
        part = RecomputedTensor(self, tensor)
        self.parts.append(ref(part))
        return part

    def store_recomputed_tensor(self, number: int, tensor: Tensor) -> None:
        """Store one part's value; RuntimeError if its layout differs from the first run's."""
        weak = self.parts[number]
        part = None if weak is None else weak()
        if part is None:
            return
        if part.layout != get_layout(tensor):
            raise RuntimeError(
                f"recomputation gave a tensor {_describe_layout(get_layout(tensor))} where the forward pass had "
                f"{_describe_layout(part.layout)}; a recomputed function must do the same in both passes, "
                "so remove branches that depend on something that has changed"
            )
        part.tensor = tensor.detach()

    @property
    def is_unrounded(self) -> bool:
        """Whether the repeated call has the arguments of the first."""
        return True

    @abstractmethod
    def recompute(self) -> None:
        """Repeat the call and fill the parts."""


class RecomputedTensor(SavedTensor):
    """Wrapper around a tensor that a repeated call computes; the tensor lives until autograd releases the wrapper."""

    __slots__ = ("call", "layout", "tensor")

    def __init__(self, call: RepeatedCall, tensor: Tensor) -> None:
        self.call = call
        self.layout = get_layout(tensor)
        self.tensor: Tensor | None = None

    @property
    def is_unrounded(self) -> bool:
        return self.call.is_unrounded

    def get_or_recompute(self) -> Tensor:
        """Return the tensor (any shape); the first request for a tensor of a call repeats the call."""
        if self.tensor is None:
            self.call.recompute()
        assert self.tensor is not None
        return self.tensor


Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]


def get_layout(tensor: Tensor) -> Layout:
    return tensor.shape, tensor.stride(), tensor.dtype


def _describe_layout(layout: Layout) -> str:
    shape, strides, dtype = layout
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)} of strides {strides}"


def is_trained_leaf_or_transpose(tensor: Tensor) -> bool:
    """Return whether a saved tensor (any shape) is a trained leaf, or its transpose."""
    if tensor.is_leaf:
        return tensor.requires_grad
    node: Any = tensor.grad_fn
    return type(node) is TRANSPOSE and type(node.next_functions[0][0]) is LEAF
