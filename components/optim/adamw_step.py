"""AdamW steps with torch's fused kernels, or on GPUs with a Triton kernel with less memory traffic."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from drawloom.kernels.operation import why_no_triton

ADAM_MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names in torch of Adam's running means of gradients and of their squares."""

AMSGRAD_MOMENTS = (*ADAM_MOMENTS, "max_exp_avg_sq")
"""Names in torch of Adam's running means and of the largest mean of squares so far."""

DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes of weights that the kernel is tested with."""


def create_fastest_adamw(groups: Iterable[dict[str, Any]], **options: Any) -> torch.optim.AdamW:
    """Return the fastest AdamW for the parameter groups; Triton's and torch's have the same state format."""
    groups = list(groups)
    if not all(_fits_triton(part) for group in groups for part in group["params"]):
        return torch.optim.AdamW(groups, fused=True, **options)
    from drawloom.components.optim.adamw_triton import AdamWTriton

    return AdamWTriton(groups, fused=True, **options)


def _fits_triton(parameter: nn.Parameter) -> bool:
    has_triton = parameter.is_cuda and not why_no_triton(parameter.device)
    return has_triton and parameter.dtype in DTYPES and parameter.is_contiguous()


class WideGradientStep(torch.optim.Optimizer):
    """
    Optimizer for gradients in wider dtypes than the weights.

    A step changes nothing if `found_inf`, float32 () on the weights' device, is not 0.
    """

    found_inf: Tensor | None = None


class FactorStep(WideGradientStep):
    """Optimizer that multiplies the gradients by each of `factors`, float32 (factors,) on the device."""

    factors: Tensor | None = None
