"""
Custom operators: functions that launch kernels, registered with torch so that torch.compile does not trace into them.

The module also decides whether Triton can run on a device, and in which dtype kernels accumulate.
"""

from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable as differentiable_once

from drawloom.kernels.costs import FlopsFunction, ScratchFunction, register_costs

MIN_CAPABILITY = (8, 0)
"""Minimum compute capability, that of Ampere: older GPUs have no bfloat16."""


def why_no_triton(device: torch.device) -> str:
    """Return the reason why Triton can't run on a device, as half a sentence; empty if it can."""
    if find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cpu":
        # Importing triton is slow, so only a CPU, where its interpreter must be on, pays for it.
        return "" if _is_interpreted() else "Triton runs on GPUs, and the device is the CPU"
    if device.type != "cuda":
        return f"Triton runs on GPUs of NVIDIA and AMD, and the device is {device.type}"
    if not torch.cuda.is_available():
        return ""  # a plan for a device that this machine does not have
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, and the kernels need 8.0"
    return ""


def _is_interpreted() -> bool:
    """Return whether Triton interprets kernels on the CPU."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


CONCRETE_TYPES = (Tensor, torch.nn.Parameter)
"""Types of tensors with data; subclasses, such as fake tensors and DTensor, must go through the dispatcher."""

KernelFunction = Callable[..., Any]


def once_differentiable(backward: KernelFunction) -> KernelFunction:
    """
    Decorate an autograd Function's `backward`, below `staticmethod`, like torch's decorator of this name.

    It takes less host time: torch's enters a no_grad context, but a backward pass without `create_graph` already runs
    in one.
    """
    checked: KernelFunction = differentiable_once(backward)

    @wraps(backward)
    def call(ctx: Any, *grads: Any) -> Any:
        return checked(ctx, *grads) if torch.is_grad_enabled() else backward(ctx, *grads)

    return call


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """Return the accumulation dtype for x (any shape): float32 for half precision, else x's dtype."""
    return torch.promote_types(x.dtype, torch.float32)


def upcast(x: Tensor) -> Tensor:
    """Cast x (any shape) to the kernels' accumulation dtype."""
    return x.to(accumulation_dtype(x))


def as_new_alias(result: Tensor) -> Tensor:
    """
    Return an autograd Function's result (any shape and dtype) as a new tensor on the same storage.

    Without it, torch 2.11's compiler confuses the result of an in-place operation, or of `to` without a change, with
    another tensor, and the Function's input gradients are zeros.
    """
    return result.detach()


def register_kernel(
    schema: str,
    *,
    fake: KernelFunction,
    flops: FlopsFunction,
    scratch: ScratchFunction,
    equivalent_flops: FlopsFunction | None = None,
) -> Callable[[KernelFunction], KernelFunction]:
    """
    Register a kernel launcher as the operator `drawloom::<name>`, which torch.compile does not trace.

    `schema` is torch's, such as "swiglu(Tensor gate, Tensor up) -> Tensor"; `fake` returns empty results for the same
    arguments. `flops`, `scratch` and `equivalent_flops` return its costs, from the arguments they name
    (`kernels/costs.py`). Under torch.compile, and for fake and meta tensors, the decorated function calls the operator;
    otherwise it calls the function directly.
    """

    def register(function: KernelFunction) -> KernelFunction:
        name = schema.partition("(")[0]
        torch.library.define(f"drawloom::{name}", schema.removeprefix(name))
        torch.library.impl(f"drawloom::{name}", ("CPU", "CUDA"), function)
        torch.library.register_fake(f"drawloom::{name}", fake)
        operation = getattr(torch.ops.drawloom, name)
        register_costs(operation, flops=flops, scratch=scratch, equivalent_flops=equivalent_flops)
        registered: KernelFunction = operation.default

        @wraps(function)
        def call_kernel_or_operator(*arguments: Any) -> Any:
            # torch's dispatcher takes longer than a launch, so eager code avoids it.
            first = arguments[0][0] if isinstance(arguments[0], list) else arguments[0]
            is_concrete = type(first) in CONCRETE_TYPES and not first.is_meta
            return function(*arguments) if is_concrete and not torch.compiler.is_compiling() else registered(*arguments)

        return call_kernel_or_operator

    return register
