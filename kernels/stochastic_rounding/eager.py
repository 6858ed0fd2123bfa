"""
Stochastic rounding from float32 to bfloat16, unbiased (Gupta et al. 2015, arXiv 1502.02551).

The probability of rounding away from zero is the lower 16 bits, which bfloat16 lacks, as a fraction. So 16 random bits
are added to the lower bits, and the sum is truncated to its upper half.
"""

import torch
from torch import Tensor

# Constants of Philox-4x32: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
WORD = 0xFFFFFFFF
PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 7
"""Fewest rounds that the paper calls safe; with the usual ten, the optimizer's step would not be memory-bound."""


def philox(key: int, index: Tensor, counter: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four words with 32 random bits per index, all int64 (draws,) like index; key and counter have 64 bits."""
    a, b = index & WORD, (index >> 32) & WORD
    c, d = torch.full_like(index, counter & WORD), torch.full_like(index, counter >> 32 & WORD)
    first, second = key & WORD, key >> 32 & WORD
    for _ in range(PHILOX_ROUNDS):
        # int64 products of 32-bit words may overflow into the sign; the masks below keep the correct bits.
        product, other = a * PHILOX_MULTIPLIERS[0], c * PHILOX_MULTIPLIERS[1]
        a, c = _upper_32_bits(other) ^ b ^ first, _upper_32_bits(product) ^ d ^ second
        b, d = other & WORD, product & WORD
        first, second = first + PHILOX_WEYL[0] & WORD, second + PHILOX_WEYL[1] & WORD
    return a, b, c, d


def _upper_32_bits(product: Tensor) -> Tensor:
    """Return the upper 32 bits of 64-bit products."""
    return (product >> 32) & WORD


def split_into_16bit_halves(words: Tensor) -> Tensor:
    """Return the words' lower, then their upper 16 bits, (2 * n,), from n words in an int64 tensor (any shape)."""
    return torch.stack((words & 0xFFFF, words >> 16), -1).flatten()


def round_stochastically(x: Tensor, noise: Tensor) -> Tensor:
    """Round x, float32 (n,), to bfloat16 (n,), with 16 noise bits per element in any integer dtype (n,)."""
    bits = x.contiguous().view(torch.int32)
    # Noise added to a NaN whose bits are all ones would overflow into the sign and make it zero. So NaN is truncated,
    # and made quiet by 0x40, or a payload that is only in the lower half would become infinity.
    rounded = torch.where(x.isnan(), bits >> 16 | 0x40, bits + noise.to(torch.int32) >> 16)
    return rounded.to(torch.int16).view(torch.bfloat16)
