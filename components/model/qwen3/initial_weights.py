"""Initial weights that depend on a parameter's name, an element's index and the seed, and on nothing else."""

import math

import torch
from torch import Tensor

from drawloom.components.distributed.counter_rng import fill_normal
from drawloom.components.distributed.rng import derive_seed
from drawloom.components.ports.model import TensorSlice

RESIDUAL_OUTPUTS = (".self_attn.o_proj.weight", ".mlp.down_proj.weight", ".mlp.experts.down_proj")


def fill_with_initial_weights(
    name: str, parameter: Tensor, *, seed: int, layers: int, std: float, part_of: TensorSlice | None = None
) -> None:
    """
    Fill a parameter of any floating-point dtype, or the slice `part_of` says, on its device: norm weights with 1,
    matrices with normal numbers of this standard deviation.

    The 2 * layers matrices whose outputs are added to the residual stream get it divided by sqrt(2 * layers), so
    that the stream does not grow with depth (GPT-2, section 2.3). The numbers are float32, rounded to the dtype.
    """
    if parameter.ndim < 2:
        with torch.no_grad():
            parameter.fill_(1.0)
        return
    scale = std / math.sqrt(2 * layers) if name.endswith(RESIDUAL_OUTPUTS) else std
    part = part_of or TensorSlice(tuple(parameter.shape), (0,) * parameter.ndim)
    fill_normal(parameter, derive_seed(seed, "initial weights", name), scale, part.shape, part.offsets)
