"""What every choice of precision is."""

import torch

from drawloom.components.ports.distributed import Precision
from drawloom.graph.testing import expect


def all_are_floating(precision: Precision) -> None:
    """Each dtype is a floating one, and sums over ranks are at least as wide as float32."""
    for name in ("parameter", "compute", "gradient", "reduce"):
        dtype = getattr(precision, name)
        expect(isinstance(dtype, torch.dtype) and dtype.is_floating_point, f"{name} is {dtype}")
    expect(precision.reduce.itemsize >= 4, f"sums are in {precision.reduce}")
