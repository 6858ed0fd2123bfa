"""
Activation checkpointing of calls: `call_with_recomputation` keeps only a call's arguments, such as a block's, and
repeats the call when the backward pass needs its first saved tensor (Chen et al. 2016, "Training Deep Nets with
Sublinear Memory Cost", arXiv 1604.06174).

torch.utils.checkpoint returns a recomputed tensor only once, so weight gradients of torch's matmuls can't be deferred,
and it selects operations in torch's dispatcher, which our kernels bypass. Here autograd saves a `SavedTensor` for each,
readable any number of times.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from drawloom.kernels.recompute.marks import keep_results, mark_as_recomputation
from drawloom.kernels.recompute.saved_tensors import (
    KeptTensor,
    RepeatedCall,
    SavedTensor,
    is_trained_leaf_or_transpose,
    unpack,
)


def call_with_recomputation(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """
    Call a function, and keep only weights and tensors among the arguments for the backward pass.

    The function runs again in the backward pass, up to its last saved tensor, with the same random numbers and the same
    autocast.
    """
    call = _FunctionRecomputation(function, arguments, named)
    with saved_tensors_hooks(call.pack, unpack), keep_results(call.kept):
        return function(*arguments, **named)


class _FunctionRecomputation(RepeatedCall):
    """Function call, whose parts are its saved tensors."""

    __slots__ = ("_arguments", "_autocast", "_function", "_named", "_random", "kept")

    def __init__(self, function: Callable[..., Any], arguments: Sequence[Any], named: dict[str, Any]) -> None:
        super().__init__()
        self.kept: list[Any] = []
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
        if is_trained_leaf_or_transpose(tensor) or tensor.layout != torch.strided:
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
                keep_results(self.kept),
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
