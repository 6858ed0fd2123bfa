"""
Selective activation checkpointing: within `Selective`, results of `call_recomputable` operations, such as norms and
gates, are recomputed from the operation's arguments, saved anyway; all other tensors are kept (Korthikanti et al. 2022,
"Reducing Activation Recomputation", arXiv 2205.05198, section 5). Within `Quantized`, arguments of norms and gates are
also kept in 8 bits.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import Token
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

from drawloom.kernels.recompute.marks import CallRecorder, RowKernels, recorder
from drawloom.kernels.recompute.saved_tensors import KeptTensor, RepeatedCall, SavedTensor, get_layout, unpack


class Selective(CallRecorder):
    """
    Context manager that drops the results of cheap operations until the backward pass recomputes them.

    A saved tensor is recognized by its address, as long as the result with the same memory lives.
    """

    __slots__ = ("_hooks", "_results", "_token")

    def __init__(self) -> None:
        self._results: dict[int, tuple[ref[Tensor], int]] = {}
        self._hooks = saved_tensors_hooks(self._pack, unpack)

    def __enter__(self) -> None:
        self._token: Token[CallRecorder | None] = recorder.set(self)
        self._hooks.__enter__()

    def __exit__(self, *_: object) -> None:
        self._hooks.__exit__()
        recorder.reset(self._token)

    def record_recomputable_call(self, results: Any, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
        tensors = results if isinstance(results, tuple) else (results,)
        packed = [self._pack_argument(value) if isinstance(value, Tensor) else value for value in arguments]
        call = _OperationRecomputation(function, packed)
        for result in tensors:
            # The part lives as long as its result, or as long as autograd keeps it.
            result.recomputed = call.add(result)
            if result.is_contiguous() and (address := _address(result)):
                self._results[address] = ref(result), result._version

    def _pack_argument(self, tensor: Tensor) -> SavedTensor:
        """Return the wrapper for a recomputable call's argument (any shape)."""
        return self._pack(tensor)

    def _pack(self, tensor: Tensor) -> SavedTensor:
        weak, version = self._results.get(_address(tensor), (lambda: None, 0))
        result: Any = weak()
        if result is None or result._version != version or tensor.dtype != result.dtype:
            return KeptTensor(tensor)
        # A tensor at the result's address is a view of it, or of something larger that begins with it.
        if _count_spanned_elements(tensor) > result.numel():
            return KeptTensor(tensor)
        return (
            result.recomputed
            if get_layout(tensor) == get_layout(result)
            else _RecomputedView(result.recomputed, tensor)
        )


class Quantized(Selective):
    """
    `Selective` with the arguments of norms and gates in 8 bits (COAT: Xi et al. 2024, arXiv 2410.19313, section 5).

    Gradients of norms, gates and weights then read rounded numbers. All other operations save exact tensors: attention
    and cross entropy would combine rounded inputs with an exact log-sum-exp.
    """

    __slots__ = ("_keeps_rounded", "_operation")

    def __init__(self) -> None:
        super().__init__()
        self._operation: _RoundedArguments | None = None
        self._keeps_rounded = False

    @contextmanager
    def round_arguments(
        self, load_kernels: Callable[[], RowKernels], arguments: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]
    ) -> Iterator[None]:
        self._operation = _RoundedArguments(load_kernels(), arguments, shapes)
        try:
            yield
        finally:
            self._operation = None

    @contextmanager
    def keep_rounded(self) -> Iterator[None]:
        before, self._keeps_rounded = self._keeps_rounded, True
        try:
            yield
        finally:
            self._keeps_rounded = before

    def _pack_argument(self, tensor: Tensor) -> SavedTensor:
        return self._pack(tensor) if self._operation is not None else super()._pack(tensor)

    def _pack(self, tensor: Tensor) -> SavedTensor:
        saved = super()._pack(tensor)
        if self._operation is not None:
            can_be_rounded = isinstance(saved, KeptTensor) and not isinstance(tensor, Parameter)
            return self._operation.pack(tensor) or saved if can_be_rounded else saved
        return saved if saved.is_unrounded or self._keeps_rounded else KeptTensor(tensor)


class _RoundedArguments:
    """An operation's arguments in 8 bits; a tensor that it saves and records is rounded once."""

    __slots__ = ("_arguments", "_kernels", "_rounded", "_shapes")

    def __init__(self, kernels: RowKernels, arguments: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> None:
        self._kernels, self._arguments, self._shapes = kernels, arguments, shapes
        self._rounded: list[tuple[Tensor, _RoundedTensor]] = []

    def pack(self, tensor: Tensor) -> SavedTensor | None:
        """Return a wrapper for an argument (..., width), its view, or a result with its shape; None for others."""
        for whole, rounded in self._rounded:
            if _contains(whole, tensor):
                same = get_layout(tensor) == get_layout(whole)
                return (
                    rounded
                    if same
                    else _RecomputedView(rounded, tensor, int(tensor.storage_offset() - whole.storage_offset()))
                )
        whole = next((argument for argument in self._arguments if _contains(argument, tensor)), tensor)
        if not whole.is_contiguous() or tuple(whole.shape) not in self._shapes or whole.dtype.itemsize == 1:
            return None
        self._rounded.append((whole, _RoundedTensor(whole, self._kernels)))
        return self.pack(tensor)


def _contains(whole: Tensor, tensor: Tensor) -> bool:
    """Return whether a contiguous tensor's memory includes another tensor (any shapes)."""
    begin = tensor.storage_offset() - whole.storage_offset()
    return (
        tensor.dtype == whole.dtype
        and whole.is_contiguous()
        and tensor.untyped_storage()._cdata == whole.untyped_storage()._cdata
        and 0 <= begin <= whole.numel() - _count_spanned_elements(tensor)
    )


class _RoundedTensor(SavedTensor):
    """Wrapper around elements in 8 bits and scales; the tensor lives from its first use until the wrapper's release."""

    __slots__ = ("_data", "_dtype", "_kernels", "_scale", "_shape", "_value")

    def __init__(self, tensor: Tensor, kernels: RowKernels) -> None:
        with torch.no_grad():
            rows = kernels.quantize_rows(tensor.detach().reshape(-1, tensor.shape[-1]), transposed=False)
        self._data, self._scale, self._kernels = KeptTensor(rows.data), KeptTensor(rows.scale), kernels
        self._shape, self._dtype = tensor.shape, tensor.dtype
        self._value: Tensor | None = None

    @property
    def is_unrounded(self) -> bool:
        return False

    def get_or_recompute(self) -> Tensor:
        """Return the rounded tensor (..., width), which is exact in bfloat16 and wider dtypes."""
        if self._value is None:
            with torch.no_grad():
                rows = self._kernels.dequantize_rows(
                    self._data.get_or_recompute(), self._scale.get_or_recompute(), self._dtype
                )
            self._value = rows.view(self._shape)
        return self._value


def _address(tensor: Tensor) -> int:
    """Return a tensor's address (any shape); 0 without elements."""
    if tensor.is_meta:  # views share the storage, although it has no memory
        return tensor.untyped_storage()._cdata + tensor.storage_offset() if tensor.numel() else 0
    return tensor.data_ptr() if tensor.numel() else 0


def _count_spanned_elements(tensor: Tensor) -> int:
    """Return how many elements a tensor (any shape) spans in memory, from its first to its last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


class _OperationRecomputation(RepeatedCall):
    """Cheap operation's call, whose parts are its results."""

    __slots__ = ("_arguments", "_function")

    def __init__(self, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
        super().__init__()
        self._function = function
        self._arguments = arguments

    @property
    def is_unrounded(self) -> bool:
        return all(value.is_unrounded for value in self._arguments if isinstance(value, SavedTensor))

    def recompute(self) -> None:
        with torch.no_grad():
            arguments = [
                value.get_or_recompute() if isinstance(value, SavedTensor) else value for value in self._arguments
            ]
            results = self._function(*arguments)
        for number, result in enumerate(results if isinstance(results, tuple) else (results,)):
            self.store_recomputed_tensor(number, result)


class _RecomputedView(SavedTensor):
    """
    Wrapper saved in place of a view: it has the view's shape and strides, and the recomputed or rounded tensor, in
    which it begins at an offset.
    """

    __slots__ = ("_offset", "_part", "_shape", "_strides")

    def __init__(self, part: SavedTensor, view: Tensor, offset: int = 0) -> None:
        self._part = part
        self._shape, self._strides, self._offset = view.shape, view.stride(), offset

    @property
    def is_unrounded(self) -> bool:
        return self._part.is_unrounded

    def get_or_recompute(self) -> Tensor:
        """Return the view (any shape)."""
        whole = self._part.get_or_recompute()
        return whole.as_strided(self._shape, self._strides, whole.storage_offset() + self._offset)
