"""RMSNorm with its result also rounded to float8, for the next products."""

from torch import Tensor

from drawloom.kernels.float8.casts import Float8Kernels
from drawloom.kernels.float8.linear import attach_quantized_rows
from drawloom.kernels.recompute.marks import keep_arguments_in_8_bits, record_recomputable_call
from drawloom.kernels.results import NormAndSum


def rms_norm_float8(
    kernels: Float8Kernels, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, zero_centered: bool
) -> NormAndSum:
    """
    Return x + residual, normed, and the sum, both (..., width); products in float8 find the norm's rounded rows.

    Without a residual, the sum is x. `weight` is (width,); if `zero_centered`, the factor is 1 + weight.
    """
    with keep_arguments_in_8_bits(lambda: kernels, x):
        normed, summed, rows = kernels.norm_and_quantize(x, residual, weight, eps, zero_centered)
        attach_quantized_rows(normed, rows)
        # Recomputation starts from the sum, which is saved anyway, not from its terms.
        record_recomputable_call(normed, kernels.norm, summed, weight, eps, zero_centered)
    return NormAndSum(normed, summed)
