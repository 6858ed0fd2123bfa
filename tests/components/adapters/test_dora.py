"""DoRA's scale of rows."""

import torch

from drawloom.components.adapters.dora import dora_scale


def test_the_scale_is_magnitude_by_norm_of_the_changed_row() -> None:
    """The norm is that of W + scale * B A, which is not computed; its gradient is of the magnitude alone."""
    torch.manual_seed(0)
    w, a, b = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 7), (2, 7), (5, 2)))
    magnitude = torch.rand(5, dtype=torch.float64, requires_grad=True)
    found = dora_scale(w, a, b, 0.3, magnitude)
    torch.testing.assert_close(found, magnitude / (w + 0.3 * b @ a).norm(dim=1))
    assert [grad is not None for grad in torch.autograd.grad(found.sum(), [w, a, b, magnitude], allow_unused=True)] == [
        False,
        False,
        False,
        True,
    ]
