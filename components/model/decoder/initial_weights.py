"""Initial values for a decoder's parameters."""

import math

import torch
from torch import Tensor

from drawloom.components.distributed.rng import derive_seed, fill_normal
from drawloom.ports import Role, TensorSlice


def fill_with_initial_weights(
    name: str,
    parameter: Tensor,
    role: Role,
    *,
    seed: int,
    layers: float,
    std: float,
    tensor_slice: TensorSlice | None = None,
) -> None:
    """
    Fill a parameter (any shape, any floating-point dtype), or its slice `tensor_slice`, in place by its role.

    Normal random numbers have the standard deviation `std`, times the role's scaling. The outputs of 2 * layers
    matrices are added to the residual stream; their standard deviation is divided by sqrt(2 * layers), so that the
    stream does not grow with depth (Radford et al. 2019, GPT-2, section 2.3). Random numbers depend on the seed, the
    name and the element's index only; they are drawn in float32 and rounded to the dtype.
    """
    if isinstance(role.initial, float):
        with torch.no_grad():
            parameter.fill_(role.initial)
        return
    # Each layer adds two outputs to the stream: attention's and the feed-forward network's.
    std *= role.scaling.initial_std
    if role.is_residual:
        std /= math.sqrt(2 * layers)
    scale = std if role.initial == "normal" else 1.0
    part = tensor_slice or TensorSlice.whole(tuple(parameter.shape))
    fill_normal(parameter, derive_seed(seed, "initial weights", name), scale, part.shape, part.offsets)
    if callable(role.initial):
        with torch.no_grad():
            parameter.copy_(role.initial(torch.special.ndtr(parameter.double())))
