"""The angles of the rotary position embedding."""

import torch
from torch import Tensor


def rotary_angles(positions: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """
    Cosines and sines of each position's angles: float32 (rows, length, head_dim // 2) from int64 (rows, length).

    Channel pair i turns by base^(-2i / head_dim) a position.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions.unsqueeze(-1).to(torch.float32) * (1.0 / base**exponents)
    return angles.cos(), angles.sin()
