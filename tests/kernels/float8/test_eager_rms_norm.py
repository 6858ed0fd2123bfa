"""RMSNorm with float8 rows of its result."""

import pytest
import torch

from drawloom.kernels.float8.eager import EAGER
from drawloom.kernels.float8.linear import rms_norm_float8
from drawloom.kernels.float8.triton import TRITON
from drawloom.kernels.rms_norm.triton import add_rms_norm_triton, rms_norm_triton
from support.kernels import DEVICE


@pytest.mark.parametrize(("rows", "width"), [(1, 16), (9, 80), (37, 1040)])
def test_norms_round_their_results_to_float8(rows: int, width: int) -> None:
    """
    With and without a residual, layers in float8 find rows and scales with the bits of a cast of the result, which has
    the bits of the plain norm; so have gradients.
    """
    x, weight = torch.randn(rows, width, device=DEVICE).bfloat16(), torch.randn(width, device=DEVICE).bfloat16()
    x[0, 3] = torch.nan if rows > 1 else 0
    leaves = x.requires_grad_(), weight.requires_grad_()
    for residual in (None, x):
        normed, summed = rms_norm_float8(TRITON, x, residual, weight, 1e-6, residual is not None)
        if residual is None:
            results, expected = [normed], [rms_norm_triton(x, weight, 1e-6)]
        else:
            results, expected = [normed, summed], [*add_rms_norm_triton(x, residual, weight, 1e-6, True)]
        grads = [torch.autograd.grad([*map(torch.sum, tensors)], leaves) for tensors in (results, expected)]
        for ours, theirs in zip([*results, *grads[0]], [*expected, *grads[1]], strict=True):
            assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))
        kept, rounded = normed.float8().rows, EAGER.quantize_rows(normed, False)  # type: ignore[attr-defined]
        assert torch.equal(kept.scale.nan_to_num(7.0), rounded.scale.nan_to_num(7.0))
        assert torch.equal(kept.data.float().nan_to_num(7.0), rounded.data.float().nan_to_num(7.0))


def test_the_operator_passes_opcheck() -> None:
    """The operator passes torch.library.opcheck, by which plans know the shapes of its results."""
    x, weight = torch.randn(3, 16, device=DEVICE), torch.randn(16, device=DEVICE)
    for residual in (None, x + 1):
        torch.library.opcheck(torch.ops.drawloom.rms_norm_float8.default, (x, residual, weight, 1e-6, True))
