"""Functions as operations of torch, for compilers that can't look into them; and whether Triton can run on a device."""

from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

LEAST_CAPABILITY = (8, 0)
"""Ampere: older GPUs have no bfloat16."""


def why_no_triton(device: torch.device) -> str:
    """Why Triton can't run on a device, or nothing. Only on a CPU is triton imported: its interpreter may be on."""
    if find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cpu":
        return "" if _interprets() else "Triton runs on GPUs, and the device is the CPU"
    if device.type != "cuda":
        return f"Triton runs on GPUs of NVIDIA and AMD, and the device is {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, and the kernels need 8.0"
    return ""


def _interprets() -> bool:
    from triton import knobs

    return bool(knobs.runtime.interpret)


PLAIN = (Tensor, torch.nn.Parameter)
"""Tensors that are what they seem, and stand for no others."""

Launch = Callable[..., Any]


def own(result: Tensor) -> Tensor:
    """
    What an autograd Function gives, as a tensor of its own, without a copy.

    torch 2.11's compiler takes what an operation in place gave, or `to` without a change, for another tensor, and the
    Function's inputs get zeros for gradients.
    """
    return result.detach()


def register_kernel(schema: str, fake: Launch) -> Callable[[Launch], Launch]:
    """
    Make a function that launches kernels an operation of torch, which torch.compile takes as it is.

    `like` gives empty results for the same arguments. What comes back is the operation to a compiler, and for tensors
    that are not there, by which pipelines find out what passes between stages; otherwise it is the function itself,
    for the way through torch's dispatcher and back takes longer than a launch.
    """

    def register(launch: Launch) -> Launch:
        name = schema.partition("(")[0]
        torch.library.define(f"drawloom::{name}", schema.removeprefix(name))
        torch.library.impl(f"drawloom::{name}", ("CPU", "CUDA"), launch)
        torch.library.register_fake(f"drawloom::{name}", fake)
        registered: Launch = getattr(torch.ops.drawloom, name).default

        @wraps(launch)
        def call(*arguments: Any) -> Any:
            first = arguments[0]
            there = type(first) in PLAIN and not first.is_meta
            return launch(*arguments) if there and not torch.compiler.is_compiling() else registered(*arguments)

        return call

    return register
