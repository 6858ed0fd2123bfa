"""
Activation checkpointing: the backward pass recomputes tensors not kept in the forward pass.

`call_with_recomputation` keeps only a call's arguments, such as a block's, and repeats the call when the backward pass
needs its first saved tensor (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174).
Within `Selective`, results of `call_recomputable` operations, such as norms and gates, are recomputed from the
operation's arguments, saved anyway; all other tensors are kept (Korthikanti et al. 2022, "Reducing Activation
Recomputation", arXiv 2205.05198, section 5). Within `Quantized`, arguments of norms and gates are also kept in 8 bits.

torch.utils.checkpoint returns a recomputed tensor only once, so weight gradients of torch's matmuls can't be deferred,
and it selects operations in torch's dispatcher, which our kernels bypass. Here autograd saves a `SavedTensor` for each,
readable any number of times.

Activation checkpointing: the policy for recomputed activations in a stage's backward pass.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, Token
from functools import partial
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
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
    return isinstance(tensor, Parameter) or isinstance(tensor._base, Parameter) or _is_trained_leaf_or_transpose(tensor)


class _Recomputation(ABC):
    """Call that can be repeated to compute its tensors; unreferenced tensors are skipped."""

    __slots__ = ("parts",)

    def __init__(self) -> None:
        self.parts: list[ref[_RecomputedTensor] | None] = []

    def add(self, tensor: Tensor) -> "_RecomputedTensor":
        """Append a wrapper for the call's next tensor (any shape)."""
        part = _RecomputedTensor(self, tensor)
        self.parts.append(ref(part))
        return part

    def store_recomputed_tensor(self, number: int, tensor: Tensor) -> None:
        """Store one part's value; RuntimeError if its layout differs from the first run's."""
        weak = self.parts[number]
        part = None if weak is None else weak()
        if part is None:
            return
        if part.layout != _get_layout(tensor):
            raise RuntimeError(
                f"recomputation gave a tensor {_describe_layout(_get_layout(tensor))} where the forward pass had "
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


class _RecomputedTensor(SavedTensor):
    """Wrapper around a tensor that a repeated call computes; the tensor lives until autograd releases the wrapper."""

    __slots__ = ("call", "layout", "tensor")

    def __init__(self, call: _Recomputation, tensor: Tensor) -> None:
        self.call = call
        self.layout = _get_layout(tensor)
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


def _get_layout(tensor: Tensor) -> Layout:
    return tensor.shape, tensor.stride(), tensor.dtype


def _describe_layout(layout: Layout) -> str:
    shape, strides, dtype = layout
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)} of strides {strides}"


def call_with_recomputation(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """
    Call a function, and keep only weights and tensors among the arguments for the backward pass.

    The function runs again in the backward pass, up to its last saved tensor, with the same random numbers and the same
    autocast.
    """
    call = _FunctionRecomputation(function, arguments, named)
    with saved_tensors_hooks(call.pack, unpack):
        return function(*arguments, **named)


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


class _FunctionRecomputation(_Recomputation):
    """Function call, whose parts are its saved tensors."""

    __slots__ = ("_arguments", "_autocast", "_function", "_named", "_random")

    def __init__(self, function: Callable[..., Any], arguments: Sequence[Any], named: dict[str, Any]) -> None:
        super().__init__()
        # The meta device has neither autocast nor random numbers.
        devices = (value.device for value in arguments if isinstance(value, Tensor) and not value.is_meta)
        device = next(devices, torch.device("cpu"))
        self._function = function
        self._arguments = [_wrap_argument(value) for value in arguments]
        self._named = {name: _wrap_argument(value) for name, value in named.items()}
        self._autocast = _Autocast(device.type)
        self._random = _RandomState(device)

    def pack(self, tensor: Tensor) -> SavedTensor:
        """Keep a weight, which takes no memory of its own; for any other tensor (any shape) add a part."""
        if _is_trained_leaf_or_transpose(tensor) or tensor.layout != torch.strided:
            self.parts.append(None)
            return KeptTensor(tensor)
        return self.add(tensor)

    def recompute(self) -> None:
        number = -1

        def fill_next(tensor: Tensor) -> Tensor:
            nonlocal number
            number += 1
            self.store_recomputed_tensor(number, tensor)
            if number == len(self.parts) - 1:
                raise _AllFilledError
            return tensor.detach()

        arguments = [_unwrap_argument(value) for value in self._arguments]
        named = {name: _unwrap_argument(value) for name, value in self._named.items()}
        now = _RandomState(self._random.device)
        self._random.restore()
        try:
            with (
                mark_as_recomputation(),
                saved_tensors_hooks(fill_next, _identity),
                self._autocast.context(),
                torch.enable_grad(),
            ):
                self._function(*arguments, **named)
        except _AllFilledError:
            return
        finally:
            now.restore()
        raise RuntimeError(
            f"recomputation saved only {number + 1} of the {len(self.parts)} tensors that the forward pass saved; a "
            "recomputed function must do the same in both passes"
        )


class _AllFilledError(Exception):
    """Signal that all tensors are recomputed, so the rest of the function need not run."""


def _identity(tensor: Tensor) -> Tensor:
    return tensor


class _Argument:
    """Tensor among a call's arguments."""

    __slots__ = ("_kept", "_requires_grad")

    def __init__(self, tensor: Tensor) -> None:
        self._kept = KeptTensor(tensor)
        self._requires_grad = tensor.requires_grad

    def restore(self) -> Tensor:
        """Return the tensor (any shape), detached: the repeated call builds its own graph."""
        return self._kept.get_or_recompute().detach().requires_grad_(self._requires_grad)


def _wrap_argument(value: Any) -> Any:
    return _Argument(value) if isinstance(value, Tensor) else value


def _unwrap_argument(value: Any) -> Any:
    return value.restore() if isinstance(value, _Argument) else value


def _is_trained_leaf_or_transpose(tensor: Tensor) -> bool:
    """Return whether a saved tensor (any shape) is a trained leaf, or its transpose."""
    if tensor.is_leaf:
        return tensor.requires_grad
    node: Any = tensor.grad_fn
    return type(node) is TRANSPOSE and type(node.next_functions[0][0]) is LEAF


class _RandomState:
    """States for torch's default generators for the CPU and a GPU."""

    __slots__ = ("_cpu", "_cuda", "device")

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cpu = torch.get_rng_state()
        # A CUDA graph that draws random numbers draws new ones with each launch, so that the state is useless.
        has_state = device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
        self._cuda = torch.cuda.get_rng_state(device) if has_state else None

    def restore(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self.device)


class _Autocast:
    """A call's autocast options. drawloom uses no autocast, but a transform may."""

    __slots__ = ("_options",)

    def __init__(self, kind: str) -> None:
        self._options: dict[str, Any] = {
            "device_type": kind,
            "enabled": torch.is_autocast_enabled(kind),
            "dtype": torch.get_autocast_dtype(kind),
        }

    def context(self) -> torch.autocast:
        """Return a context manager with these options."""
        return torch.autocast(**self._options)


def call_recomputable(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call an operation, and mark its results for `Selective` to drop and recompute: it is quick for their memory."""
    results = function(*arguments)
    record_recomputable_call(results, function, *arguments)
    return results


def call_recomputable_in_autograd_function(function: Callable[..., Any], *arguments: Any) -> Any:
    """
    Call a `call_recomputable` operation inside an autograd Function's forward pass, where no tensor requires a
    gradient.
    """
    results = function(*arguments)
    if (selective := _selective.get()) is not None:
        selective.record_recomputable_call(results, function, arguments)
    return results


def record_recomputable_call(results: Any, function: Callable[..., Any], *arguments: Any) -> None:
    """Pass a function call's results, a tensor or a tuple of tensors, to the active `Selective`, if any."""
    if torch.compiler.is_compiling() or (selective := _selective.get()) is None:
        return
    values = *(results if isinstance(results, tuple) else (results,)), *arguments
    # Rounded inputs require no gradient, and are saved for the gradients of other tensors.
    if any(isinstance(value, Tensor) and value.requires_grad for value in values):
        selective.record_recomputable_call(results, function, arguments)


class Selective:
    """
    Context manager that drops the results of cheap operations until the backward pass recomputes them.

    A saved tensor is recognized by its address, as long as the result with the same memory lives.
    """

    __slots__ = ("_hooks", "_results", "_token")

    def __init__(self) -> None:
        self._results: dict[int, tuple[ref[Tensor], int]] = {}
        self._hooks = saved_tensors_hooks(self._pack, unpack)

    def __enter__(self) -> None:
        self._token: Token[Selective | None] = _selective.set(self)
        self._hooks.__enter__()

    def __exit__(self, *_: object) -> None:
        self._hooks.__exit__()
        _selective.reset(self._token)

    def record_recomputable_call(self, results: Any, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
        """Remember the call behind these results for the backward pass."""
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
        weak, version = self._results.get(_address(tensor), (_return_none, 0))
        result: Any = weak()
        if result is None or result._version != version or tensor.dtype != result.dtype:
            return KeptTensor(tensor)
        # A tensor at the result's address is a view of it, or of something larger that begins with it.
        if _count_spanned_elements(tensor) > result.numel():
            return KeptTensor(tensor)
        return (
            result.recomputed
            if _get_layout(tensor) == _get_layout(result)
            else _RecomputedView(result.recomputed, tensor)
        )


_selective: ContextVar[Selective | None] = ContextVar("selective", default=None)


def _return_none() -> None:
    return None


class RowKernels(Protocol):
    """Casts of rows to elements of 8 bits with power-of-two scales, float32 (rows,), and back."""

    def quantize_rows(self, x: Tensor, transposed: bool) -> Any:
        """Return elements (rows, width) and scales (rows,) as `data` and `scale`, for x (rows, width)."""
        ...

    def dequantize_rows(self, data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Return elements times scales, (rows, width)."""
        ...


class Quantized(Selective):
    """
    `Selective` with the arguments of norms and gates in 8 bits (COAT: Xi et al. 2024, arXiv 2410.19313, section 5).

    Gradients of norms, gates and weights then read rounded numbers. All other operations save exact tensors: attention
    and cross entropy would combine rounded inputs with an exact log-sum-exp.
    """

    __slots__ = ("_accepts_rounded", "_operation")

    def __init__(self) -> None:
        super().__init__()
        self._operation: _RoundedArguments | None = None
        self._accepts_rounded = False

    @contextmanager
    def round_arguments(self, operation: "_RoundedArguments") -> Iterator[None]:
        """Keep an operation's arguments in 8 bits within this context."""
        self._operation = operation
        try:
            yield
        finally:
            self._operation = None

    @contextmanager
    def accept_rounded(self) -> Iterator[None]:
        """Recompute saved tensors within this context from rounded arguments, too."""
        before, self._accepts_rounded = self._accepts_rounded, True
        try:
            yield
        finally:
            self._accepts_rounded = before

    def _pack_argument(self, tensor: Tensor) -> SavedTensor:
        return self._pack(tensor) if self._operation is not None else super()._pack(tensor)

    def _pack(self, tensor: Tensor) -> SavedTensor:
        saved = super()._pack(tensor)
        if self._operation is not None:
            can_be_rounded = isinstance(saved, KeptTensor) and not isinstance(tensor, Parameter)
            return self._operation.pack(tensor) or saved if can_be_rounded else saved
        return saved if saved.is_unrounded or self._accepts_rounded else KeptTensor(tensor)


def keep_arguments_in_8_bits(
    load_kernels: Callable[[], RowKernels], *arguments: Tensor, shape: Sequence[int] = ()
) -> AbstractContextManager[None]:
    """
    Return a context for a norm or gate, and its `record_recomputable_call`: within `Quantized`, its arguments (...,
    width), and saved results with their shape or with `shape`, are kept in 8 bits. Only then `load_kernels` is called.
    """
    selective = None if torch.compiler.is_compiling() else _selective.get()
    if not isinstance(selective, Quantized):
        return nullcontext()
    shapes = [tuple(shape), *(tuple(argument.shape) for argument in arguments)]
    return selective.round_arguments(_RoundedArguments(load_kernels(), arguments, shapes))


def accept_rounded_inputs() -> AbstractContextManager[None]:
    """Return a context for products that save inputs only for weight gradients: `Quantized` may round them."""
    selective = None if torch.compiler.is_compiling() else _selective.get()
    return selective.accept_rounded() if isinstance(selective, Quantized) else nullcontext()


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
                same = _get_layout(tensor) == _get_layout(whole)
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
            rows = kernels.quantize_rows(tensor.detach().reshape(-1, tensor.shape[-1]), False)
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


class _OperationRecomputation(_Recomputation):
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


_every: ContextVar[int] = ContextVar("every", default=0)
"""Recompute one block of every so many in this thread's forward pass; 0 recomputes none."""


def make_recomputable(blocks: Sequence[nn.Module]) -> None:
    """Let a stage's blocks follow `apply_recompute_policy`'s policy in their forward passes."""
    for number, block in enumerate(blocks):
        # This replaces `forward`, not `__call__`, so that hooks, such as FSDP's gathering of parameters, run once.
        block.forward = partial(_forward_block_recomputing_every_nth, number, block.forward)


def _forward_block_recomputing_every_nth(
    number: int, forward: Callable[..., Any], *arguments: Any, **named: Any
) -> Any:
    every = _every.get()
    if not every or number % every or not torch.is_grad_enabled():
        return forward(*arguments, **named)
    return call_with_recomputation(forward, *arguments, **named)


def apply_recompute_policy(policy: int | str) -> AbstractContextManager[Any]:
    """
    Return a context manager for a stage's forward pass: 'none', 'selective', 'quantized', 'blocks', or n for one of n
    blocks.
    """
    if policy == "none":
        return nullcontext()
    if policy in ("selective", "quantized"):
        return Selective() if policy == "selective" else Quantized()
    return _Blocks(policy if isinstance(policy, int) else 1)


class _Blocks:
    """Context to recompute the first of every `count` blocks."""

    __slots__ = ("_count", "_token")

    def __init__(self, count: int) -> None:
        self._count = count

    def __enter__(self) -> None:
        self._token: Token[int] = _every.set(self._count)

    def __exit__(self, *_: object) -> None:
        _every.reset(self._token)
