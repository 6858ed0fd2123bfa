"""
Counter-based normal random numbers, with the same bits on every device and in every shard layout.

A number is a function of a key and the element's index. With a sequential generator, a rank would have to draw a whole
parameter to get its slice.

Bits are equal on CPUs and GPUs because all operations are defined exactly by IEEE 754 or two's complement, and run as
separate torch operations: `log`, `cos` and `erfinv` differ between devices in their last bits, and a compiler may
contract a product and a sum within one kernel to a fused multiply-add.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def derive_seed(seed: int, *purpose: str | int) -> int:
    """Return a deterministic seed below 2^63 for a purpose, the same on every machine and in every version."""
    # JSON distinguishes (1, "2") from ("1", 2), and keeps strings separate
    text = json.dumps([seed, *purpose], ensure_ascii=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def create_generator(seed: int, *purpose: str | int) -> torch.Generator:
    """
    Return a separate CPU generator for a purpose, such as (seed, "dropout", step, layer).

    torch uses 32 bits of the seed, so two purposes collide with a probability of 2^-32.
    """
    return torch.Generator().manual_seed(derive_seed(seed, *purpose))


GAMMA = 0x9E3779B97F4A7C15 - 2**64
MIX = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
"""SplitMix64's constants, as the signed numbers that int64 tensors hold."""

# Wichura 1988, "Algorithm AS 241: The percentage points of the normal distribution", PPND7: numerators and denominators
# from the constant term up. Relative errors are below 2e-7, those of rounding to float32 nearly as large. PPND7 has
# a third pair for quantiles beyond 6.6; the error of the second is below 4e-6 there.
CENTRE = ((3.3871327179, 50.434271938, 159.29113202, 59.109374720), (1.0, 17.895169469, 78.757757664, 67.187563600))
TAIL = ((1.4234372777, 2.7568153900, 1.3067284816, 0.17023821103), (1.0, 0.73700164250, 0.12021132975))
CENTRE_END = 0.425
TAIL_CENTRE = 1.6

ATANH = tuple(2 / n for n in range(1, 15, 2))
"""2 atanh(s) / s in powers of s^2; the remainder is below 4e-13 for the s of `_compute_log`."""

CPU_CHUNK, GPU_CHUNK = 2**15, 2**22
"""Elements computed at a time: on a CPU few enough for a core's cache, on a GPU enough to hide kernel launches."""


def fill_normal(
    tensor_slice: Tensor, key: int, std: float, shape: Sequence[int] | None = None, offsets: Sequence[int] | None = None
) -> None:
    """
    Fill a floating-point tensor (any strides) with normal numbers, with mean 0 and this standard deviation.

    `tensor_slice` has any shape, and begins at `offsets` in a tensor with shape `shape` (default: the whole tensor). An
    element depends only on `key` (64 bits) and on its row-major index in the whole tensor. Numbers are computed in
    float64, rounded to float32, and then to the slice's dtype, in chunks of constant size. Raises ValueError if the
    slice is not inside the shape.
    """
    shape, offsets = tuple(shape or tensor_slice.shape), tuple(offsets or (0,) * tensor_slice.ndim)
    if len(shape) != tensor_slice.ndim or any(
        not 0 <= first <= first + size <= end
        for first, size, end in zip(offsets, tensor_slice.shape, shape, strict=True)
    ):
        raise ValueError(
            f"a slice of shape {tuple(tensor_slice.shape)} at {offsets} is not inside a tensor of shape {shape}"
        )
    strides = [math.prod(shape[dim + 1 :]) for dim in range(tensor_slice.ndim)]
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    with torch.no_grad():
        for chunk, start in _iterate_chunks_with_first_index(tensor_slice, strides, first):
            bits = draw_splitmix64_bits(key, _compute_row_major_indices(chunk, strides, start))
            chunk.copy_(convert_bits_to_normal(bits).mul_(std).float())


def draw_splitmix64_bits(key: int, positions: Tensor) -> Tensor:
    """
    Return 64 random bits per position in the SplitMix64 sequence from `key`.

    positions: any shape, int64; the result has the same shape and dtype. Source: Steele, Lea and Flood 2014, "Fast
    splittable pseudorandom number generators". Keys are starting points in one sequence of 2^64 numbers, so sequences
    of hashed keys overlap with a probability of about (numbers drawn in total) * (keys) / 2^63.
    """
    # torch has no uint64 arithmetic: int64 wraps to the same bits
    bits = (positions + 1).mul_(GAMMA).add_((key + 2**63) % 2**64 - 2**63)
    bits = _xor_with_shifted_bits(bits, 30).mul_(MIX[0])
    bits = _xor_with_shifted_bits(bits, 27).mul_(MIX[1])
    return _xor_with_shifted_bits(bits, 31)


def convert_bits_to_normal(bits: Tensor) -> Tensor:
    """
    Return a standard normal number, float64, per 64 random bits (int64, any shape), of which 53 are used.

    The bits become an odd multiple of 2^-54 between -1/2 and 1/2, to which the quantile function is applied; the
    greatest number is 8.3. Complementary bits give opposite signs.
    """
    centred = (bits.flatten() >> 11).double().add_(0.5).mul_(2.0**-53)  # exact
    rest = CENTRE_END**2 - centred * centred
    normal = _evaluate_polynomial_ratio(rest, CENTRE).mul_(centred)
    tail = (rest < 0).nonzero().squeeze(1)  # about one in seven; their values from the first ratio are replaced
    probability = 0.5 - centred[tail].abs()  # exact
    distance = _compute_log(probability).neg_().sqrt_().sub_(TAIL_CENTRE)
    normal[tail] = _evaluate_polynomial_ratio(distance, TAIL).copysign_(centred[tail])
    return normal.view(bits.shape)


def _iterate_chunks_with_first_index(
    tensor_slice: Tensor, strides: Sequence[int], first_index: int
) -> Iterator[tuple[Tensor, int]]:
    """Yield slices small enough for temporary memory, and the whole tensor's index of their first elements."""
    max_elements = CPU_CHUNK if tensor_slice.device.type == "cpu" else GPU_CHUNK
    if tensor_slice.numel() <= max_elements:
        yield tensor_slice, first_index
        return
    dim = next(dim for dim, size in enumerate(tensor_slice.shape) if size > 1)
    step = max(1, max_elements * tensor_slice.shape[dim] // tensor_slice.numel())
    for start in range(0, tensor_slice.shape[dim], step):
        chunk = tensor_slice.narrow(dim, start, min(step, tensor_slice.shape[dim] - start))
        yield from _iterate_chunks_with_first_index(chunk, strides, first_index + start * strides[dim])


def _compute_row_major_indices(chunk: Tensor, strides: Sequence[int], first_index: int) -> Tensor:
    """Return every element's row-major index in the whole tensor: int64, with the chunk's shape."""
    index = torch.full((), first_index, dtype=torch.int64, device=chunk.device)
    for size, stride in zip(chunk.shape, strides, strict=True):
        index = index.unsqueeze(-1) + torch.arange(size, device=chunk.device).mul_(stride)
    return index


def _xor_with_shifted_bits(bits: Tensor, shift: int) -> Tensor:
    """Compute bits ^ (bits >> shift) in place, with a logical shift; torch's shift is arithmetic."""
    return bits.bitwise_xor_((bits >> shift).bitwise_and_(2 ** (64 - shift) - 1))


def _compute_log(x: Tensor) -> Tensor:
    """Return the natural logarithm of positive float64 numbers, to 1e-12."""
    mantissa, exponent = torch.frexp(x)
    middle = math.sqrt(0.5)
    s = (mantissa - middle).div_(mantissa + middle)
    return _evaluate_polynomial(s * s, ATANH).mul_(s).add_((exponent.double() - 0.5).mul_(math.log(2)))


def _evaluate_polynomial_ratio(x: Tensor, coefficients: tuple[Sequence[float], Sequence[float]]) -> Tensor:
    """Return one polynomial divided by another, given the coefficients of both."""
    numerator, denominator = coefficients
    return _evaluate_polynomial(x, numerator).div_(_evaluate_polynomial(x, denominator))


def _evaluate_polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Return the sum of coefficients[n] * x^n."""
    total = x * coefficients[-1]
    for coefficient in coefficients[-2:0:-1]:
        total.add_(coefficient).mul_(x)
    return total.add_(coefficients[0])
