"""Stochastic rounding inside kernels: as in drawloom.kernels.stochastic_copy, to the bit."""

import triton
import triton.language as tl

from drawloom.kernels import philox

ROUNDS = tl.constexpr(philox.ROUNDS)


@triton.jit
def words(key, draw, counter):
    """Four words of 32 random bits for each draw (int64), of a key and a counter of any integer types."""
    # Triton types numbers by their size; and its interpreter holds those from 2^31 to 2^32 - 1, which it calls int64,
    # in 32 bits, of which a shift by 32 is no number of the upper half.
    counter = tl.cast(counter, tl.uint64)
    low, high = draw.to(tl.uint32), (draw >> 32).to(tl.uint32)
    counter_low, counter_high = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    return tl.philox(key, low, high, low * 0 + counter_low, low * 0 + counter_high, ROUNDS)


@triton.jit
def halves(word):
    """The lower and the upper 16 bits of each of n words, as 2 n numbers."""
    return tl.interleave(word & 0xFFFF, word >> 16)


@triton.jit
def round_stochastically(x, noise):
    """float32 as bfloat16, with 16 bits of noise for each element."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = tl.where(x != x, (bits >> 16) | 0x40, (bits + noise) >> 16)
    return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
