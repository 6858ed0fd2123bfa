"""A causal convolution over tokens inside documents, channel by channel, with SiLU."""

import torch
import torch.nn.functional as F
from torch import Tensor

from drawloom.kernels.operation import upcast


def causal_conv_eager(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """
    Return silu(sum over lags: weight[:, taps - 1 - lag] * x[:, token - lag]), in the dtype of x.

    x (rows, length, channels), weight (channels, taps), and ids int32 (rows, length), document numbers that never
    decrease along a row; tokens in earlier documents count as 0.
    """
    taps, wide = weight.shape[1], upcast(x)
    summed = wide * upcast(weight[:, -1])
    for lag in range(1, min(taps, x.shape[1])):
        is_same = (ids[:, lag:] == ids[:, :-lag])[..., None]
        earlier = torch.where(is_same, wide[:, :-lag], 0) * upcast(weight[:, taps - 1 - lag])
        summed = summed + F.pad(earlier, (0, 0, lag, 0))
    return F.silu(summed).to(x.dtype)
