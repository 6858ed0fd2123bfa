"""
float32 rounded to bfloat16 up or down at random, so that on average all stays (Gupta et al. 2015, arXiv 1502.02551).

The 16 bits that bfloat16 lacks are what the chance of rounding away from zero is to be: random bits are added below,
and the lower half is cut off.
"""

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 7
"""The fewest that the paper calls safe; with ten, usual elsewhere, the optimizer's step takes longer than its bytes."""


def philox(key: int, index: Tensor, counter: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words of 32 random bits for each index (int64), as int64; key and counter have 64 bits."""
    a, b = index & WORD, (index >> 32) & WORD
    c, d = torch.full_like(index, counter & WORD), torch.full_like(index, counter >> 32 & WORD)
    first, second = key & WORD, key >> 32 & WORD
    for _ in range(ROUNDS):
        product, other = a * MULTIPLIERS[0], c * MULTIPLIERS[1]  # what overflows is cut off below
        a, c = _high(other) ^ b ^ first, _high(product) ^ d ^ second
        b, d = other & WORD, product & WORD
        first, second = first + WEYL[0] & WORD, second + WEYL[1] & WORD
    return a, b, c, d


def _high(product: Tensor) -> Tensor:
    return (product >> 32) & WORD


PER_DRAW = 8
"""Four words of 32 random bits round eight numbers."""

AT_ONCE = 2**20
"""Elements that the eager code works on together; it needs some dozen bytes for each."""


def stochastic_copy_eager(target: Tensor, source: Tensor, key: int, counter: int, first: int = 0) -> None:
    """
    Write float32 into bfloat16 of the same shape, rounded stochastically.

    Infinities stay infinite, NaN stays NaN, signs stay, and what bfloat16 can hold stays as it is; beyond its largest
    number lies infinity. The noise is a function of key, counter and `first` + the element's place, alone; `first` is
    a multiple of 8.
    """
    if first % PER_DRAW:
        raise ValueError(f"first = {first} is no multiple of {PER_DRAW}")
    flat, places = source.reshape(-1), range(0, source.numel(), AT_ONCE)
    parts = [_rounded(flat[place : place + AT_ONCE], key, counter, first + place) for place in places]
    target.copy_(torch.cat(parts).view(target.shape) if parts else flat.view(target.shape))


def _rounded(x: Tensor, key: int, counter: int, first: int) -> Tensor:
    draws = torch.arange(first // PER_DRAW, -(-(first + len(x)) // PER_DRAW), device=x.device)
    words = torch.stack(philox(key, draws, counter), 1)
    return round_stochastically(x, halves(words)[: len(x)])


def halves(words: Tensor) -> Tensor:
    """The lower and the upper 16 bits of each word, flat, in this order."""
    return torch.stack((words & 0xFFFF, words >> 16), -1).flatten()


def round_stochastically(x: Tensor, noise: Tensor) -> Tensor:
    """float32 as bfloat16, with 16 bits of noise for each element."""
    bits = x.contiguous().view(torch.int32)
    # Noise would carry a NaN whose bits are all ones into the sign, and make it zero: it keeps its upper half instead.
    kept = torch.where(x.isnan(), bits >> 16 | 0x40, bits + noise.to(torch.int32) >> 16)
    return kept.to(torch.int16).view(torch.bfloat16)
