"""
The causal convolution with SiLU in Triton: all taps but the first read a token's channels from the cache.

The backward pass has two kernels: one computes the gradient before SiLU, and the weight's gradient; the other
one is the convolution in the other direction. Sums over tokens have a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from drawloom.kernels.operation import make_differentiable, register_kernel
from drawloom.kernels.triton.launch import cache_launches
from drawloom.kernels.triton.primitives import cdiv, check_floats, next_power_of_2, sum_partials

TOKENS, CHANNELS = 64, 64
"""Tokens and channels in a program."""


def causal_conv_triton(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """
    Compute causal_conv_eager for float32, bfloat16 and float16.

    x (rows, length, channels), weight (channels, taps), ids int32 (rows, length).
    """
    check_floats("causal_conv_triton", x, weight)
    return _differentiable_causal_conv(x, weight, ids)


@register_kernel("causal_conv", lambda x: x.new_empty(x.shape))
def _causal_conv(result: Tensor, x: Tensor, weight: Tensor, ids: Tensor) -> None:
    if x.numel():
        rows, length, channels = x.shape
        grid = rows * cdiv(length, TOKENS), cdiv(channels, CHANNELS)
        _forward_kernel[grid](x.contiguous(), weight.contiguous(), ids, result, length, **_kernel_constants(weight))


def _kernel_constants(weight: Tensor) -> dict[str, int]:
    channels, taps = weight.shape
    return {"SIZE": channels, "TAPS": taps, "TOKENS": TOKENS, "BLOCK": CHANNELS, "num_warps": 4}


def _count_backward_scratch_bytes(x: Tensor, weight: Tensor) -> int:
    """Return the backward pass's temporary bytes: the gradient before the gate, and partial weight gradients."""
    return x.nbytes + x.shape[0] * cdiv(x.shape[1], TOKENS) * weight.numel() * 4


@register_kernel(
    "causal_conv_backward",
    lambda x, weight: (x.new_empty(x.shape), weight.new_empty(weight.shape)),
    scratch=_count_backward_scratch_bytes,
)
def _causal_conv_backward(grads: tuple[Tensor, Tensor], grad: Tensor, x: Tensor, weight: Tensor, ids: Tensor) -> None:
    (grad_x, grad_weight), (rows, length, channels) = grads, x.shape
    if not x.numel():
        grad_weight.zero_()
        return
    grad, x, weight = grad.contiguous(), x.contiguous(), weight.contiguous()
    grid = rows * cdiv(length, TOKENS), cdiv(channels, CHANNELS)
    before_gate = torch.empty_like(x)
    parts = x.new_empty(grid[0], weight.numel(), dtype=torch.float32)
    constants = _kernel_constants(weight)
    block = next_power_of_2(weight.shape[1])
    _gate_gradient_kernel[grid](grad, x, weight, ids, before_gate, parts, length, TAP_BLOCK=block, **constants)
    _input_gradient_kernel[grid](before_gate, weight, ids, grad_x, length, **constants)
    sum_partials(parts, grad_weight)


_differentiable_causal_conv = make_differentiable(_causal_conv, _causal_conv_backward)


@triton.jit
def _locate_tile(length, SIZE: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the row's first token among all rows, this program's tokens, channels, and whether elements exist."""
    tiles = (length + TOKENS - 1) // TOKENS
    first = (tl.program_id(0) // tiles).to(tl.int64) * length
    token = tl.program_id(0) % tiles * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    return first, token, channel, (token < length)[:, None] & (channel < SIZE)[None, :]


@triton.jit
def _load_shifted(x, ids, own, first, token, channel, inside, length, lag, SIZE: tl.constexpr):
    """Load the channels of tokens `lag` before, or after if it is negative; 0 in other documents."""
    other = token - lag
    exists = (other >= 0) & (other < length)
    number = tl.load(ids + first + other, mask=exists, other=-1)
    is_same = inside & (exists & (number == own))[:, None]
    return tl.load(x + (first + other)[:, None] * SIZE + channel[None, :], mask=is_same, other=0.0).to(tl.float32)


@triton.jit
def _convolve(
    x, weight, ids, own, first, token, channel, inside, length, SIGN: tl.constexpr, SIZE: tl.constexpr,
    TAPS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return sums over taps, for tokens before if SIGN is 1 and after if it is -1."""
    summed = tl.zeros((TOKENS, BLOCK), tl.float32)
    for lag in tl.static_range(TAPS):
        factors = tl.load(weight + channel * TAPS + TAPS - 1 - lag, mask=channel < SIZE, other=0.0).to(tl.float32)
        summed += factors[None, :] * _load_shifted(x, ids, own, first, token, channel, inside, length, SIGN * lag, SIZE)
    return summed


# fmt: off
@cache_launches
@triton.jit(do_not_specialize=["length"])
def _forward_kernel(
    x, weight, ids, result, length, SIZE: tl.constexpr, TAPS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):
    # fmt: on
    """Store the gated convolution of a tile."""
    first, token, channel, inside = _locate_tile(length, SIZE, TOKENS, BLOCK)
    own = tl.load(ids + first + token, mask=token < length, other=-2)
    summed = _convolve(x, weight, ids, own, first, token, channel, inside, length, 1, SIZE, TAPS, TOKENS, BLOCK)
    gated = summed * tl.sigmoid(summed)
    offsets = (first + token)[:, None] * SIZE + channel[None, :]
    tl.store(result + offsets, gated.to(result.dtype.element_ty), mask=inside)


# fmt: off
@cache_launches
@triton.jit(do_not_specialize=["length"])
def _gate_gradient_kernel(
    grad, x, weight, ids, before_gate, parts, length, SIZE: tl.constexpr, TAPS: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK: tl.constexpr, TAP_BLOCK: tl.constexpr,
):
    # fmt: on
    """Store the gradient before the gate, and partial sums for the weight's gradient."""
    first, token, channel, inside = _locate_tile(length, SIZE, TOKENS, BLOCK)
    own = tl.load(ids + first + token, mask=token < length, other=-2)
    summed = _convolve(x, weight, ids, own, first, token, channel, inside, length, 1, SIZE, TAPS, TOKENS, BLOCK)
    offsets = (first + token)[:, None] * SIZE + channel[None, :]
    gate = tl.sigmoid(summed)
    slope = gate * (1.0 + summed * (1.0 - gate))
    grads = tl.load(grad + offsets, mask=inside, other=0.0).to(tl.float32) * slope
    tl.store(before_gate + offsets, grads.to(before_gate.dtype.element_ty), mask=inside)
    tap, sums = tl.arange(0, TAP_BLOCK)[None, :], tl.zeros((BLOCK, TAP_BLOCK), tl.float32)
    for lag in tl.static_range(TAPS):
        product = tl.sum(grads * _load_shifted(x, ids, own, first, token, channel, inside, length, lag, SIZE), 0)
        sums += tl.where(tap == TAPS - 1 - lag, product[:, None], 0.0)
    part = parts + tl.program_id(0).to(tl.int64) * (SIZE * TAPS) + channel[:, None] * TAPS + tap
    tl.store(part, sums, mask=(channel < SIZE)[:, None] & (tap < TAPS))


# fmt: off
@cache_launches
@triton.jit(do_not_specialize=["length"])
def _input_gradient_kernel(
    before_gate, weight, ids, grad_x, length, SIZE: tl.constexpr, TAPS: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # fmt: on
    """Store the input's gradient: the convolution of the gradient before the gate, backwards in time."""
    first, token, channel, inside = _locate_tile(length, SIZE, TOKENS, BLOCK)
    own = tl.load(ids + first + token, mask=token < length, other=-2)
    grads = _convolve(
        before_gate, weight, ids, own, first, token, channel, inside, length, -1, SIZE, TAPS, TOKENS, BLOCK
    )
    offsets = (first + token)[:, None] * SIZE + channel[None, :]
    tl.store(grad_x + offsets, grads.to(grad_x.dtype.element_ty), mask=inside)
