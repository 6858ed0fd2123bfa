"""Log-sum-exp whose bits depend on a row alone."""

import torch
from torch import Tensor


def logsumexp_in_fixed_order(x: Tensor) -> Tensor:
    """
    Return log(sum(exp(x))) over the last dimension of x (..., width): (...), in x's dtype; differentiable.

    torch's sums on a GPU divide a row among threads by the number of rows, which changes the last bits. Here every
    addition is elementwise, so the width alone decides the order. A row with an infinite number has no finite result.
    """
    largest = x.detach().amax(-1, keepdim=True)
    total = (x - largest).exp_()
    while (width := total.shape[-1]) > 1:
        half = width // 2
        summed = total[..., :half] + total[..., half : 2 * half]
        total = summed if width == 2 * half else torch.cat([summed, total[..., 2 * half :]], -1)
    return (total.log() + largest).squeeze(-1)
