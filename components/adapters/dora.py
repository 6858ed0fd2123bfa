"""The scale by which DoRA multiplies the rows of a weight: Liu et al. 2024, "DoRA", arXiv 2402.09353, equation 5."""

import torch
from torch import Tensor


def dora_scale(weight: Tensor, first: Tensor, second: Tensor, scale: float, magnitude: Tensor) -> Tensor:
    """
    magnitude / |row of W + scale * B A| for each row, at least float32 (outputs,).

    weight (outputs, inputs), first = A (rank, inputs), second = B (outputs, rank). It is differentiable in the
    magnitude alone: the norm is a constant for the gradient, as in section 4.3 of the paper.
    """
    with torch.no_grad():
        # By |w|² + 2 scale w·(bA) + scale² |bA|², which needs no second matrix of the weight's size.
        dtype = torch.promote_types(weight.dtype, torch.float32)
        square = torch.linalg.vector_norm(weight, dim=1, dtype=dtype).square()
        a, b = first.to(dtype), second.to(dtype)
        cross = ((weight @ first.to(weight.dtype).T).to(dtype) * b).sum(1)
        square = square + 2 * scale * cross + scale**2 * ((b @ (a @ a.T)) * b).sum(1)
        norm = square.clamp_min(0).sqrt()
    factor: Tensor = magnitude.to(dtype) / norm
    return factor
