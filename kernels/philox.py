"""
Random bits as a function of a key and a counter (Philox-4x32-7: Salmon et al. 2011, "Parallel Random Numbers").

Nobody has to keep a state or an order: the same numbers come for the same element of the same tensor at the same
counter, on one device or many, in one launch or many.
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
