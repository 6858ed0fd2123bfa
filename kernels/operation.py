"""Functions as operations of torch, for compilers that can't look into them."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

PLAIN = (Tensor, torch.nn.Parameter)
"""Tensors that are what they seem, and stand for no others."""

Launch = Callable[..., Any]


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
