"""Initial weights that depend on a parameter's name, its shape and the seed, and on nothing else."""

import hashlib
import math

import torch
from torch import Tensor

RESIDUAL_OUTPUTS = (".self_attn.o_proj.weight", ".mlp.down_proj.weight", ".mlp.experts.down_proj")


def fill_with_initial_weights(name: str, parameter: Tensor, *, seed: int, layers: int, std: float) -> None:
    """
    Norm weights are 1, matrices normal with this standard deviation.

    The 2 * layers matrices whose outputs are added to the residual stream get it divided by sqrt(2 * layers), so
    that the stream does not grow with depth (GPT-2, section 2.3). The numbers are drawn on the CPU in float32.
    """
    with torch.no_grad():
        if parameter.ndim < 2:
            parameter.fill_(1.0)
            return
        scale = std / math.sqrt(2 * layers) if name.endswith(RESIDUAL_OUTPUTS) else std
        drawn = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
        parameter.copy_(drawn.normal_(0.0, scale, generator=_generator(name, seed)))


def _generator(name: str, seed: int) -> torch.Generator:
    """Seeded by a hash that is the same in every process and on every machine."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "big") >> 1)
