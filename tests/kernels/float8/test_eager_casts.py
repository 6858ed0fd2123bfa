"""Scales of float8 rows."""

import torch

from drawloom.kernels.float8.eager import compute_power_of_two_scales


def test_scales_are_the_smallest_powers_of_two_without_overflow() -> None:
    """A row's largest element, divided by its scale, is above 224 and at most 448, also next to a power of two."""
    edges = torch.tensor([448.0, 224.0, 1.75, 1.0, 3e38, 1e-20])
    largest = torch.cat([edges, edges.nextafter(torch.tensor(torch.inf)), edges.nextafter(torch.tensor(0.0))])
    scale = compute_power_of_two_scales(largest)
    assert (torch.frexp(scale).mantissa == 0.5).all()
    assert ((largest / scale > 224) & (largest / scale <= 448)).all()
    assert (
        compute_power_of_two_scales(torch.zeros(1)).isfinite().all()
        and (0 / compute_power_of_two_scales(torch.zeros(1)) == 0).all()
    )
    assert compute_power_of_two_scales(torch.tensor([torch.inf, torch.nan])).isnan().all()
