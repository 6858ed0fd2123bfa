"""
Quantized formats for frozen weights: NF4, float8 in tiles, and MXFP4.

A weight (..., outputs, inputs) is stored as bfloat16 numbers (..., outputs, units). Their bits are a row's blocks: a
block's scale, then its elements' codes. Every row contains all that its values need. So slicing the storage, along rows
or by whole blocks, equals quantizing the weight's slice, and ranks can split, shard and gather storage like any
bfloat16 matrix.

- NF4: Dettmers et al. 2023, "QLoRA: Efficient Finetuning of Quantized LLMs", arXiv 2305.14314, section 3; codes and
  scales have bitsandbytes' bits. Scales are not quantized again, which would save 0.05 bytes per element.
- float8: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", arXiv 2412.19437, section 3.3: one scale for a 128 x 128
  tile, repeated in every row.
- MXFP4: Open Compute Project 2023, "Microscaling Formats", version 1.0.

Products with quantized frozen weights: a weight is dequantized where it is used, and again in the backward pass.

At training sizes a product takes far longer than dequantizing its weight, so a bfloat16 matrix product after one pass
over the weight is as fast as a fused kernel. Only the storage is saved for the backward pass, which computes the
input's gradient alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from drawloom.kernels.operation import once_differentiable

STORAGE = torch.bfloat16
"""Dtype of storage and of dequantized weights."""

NF4_VALUES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""Values of NF4 by code, bitsandbytes' numbers: quantiles of a normal distribution, divided by the largest."""

FP4_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4_VALUES = (*FP4_MAGNITUDES, *(-value for value in FP4_MAGNITUDES))
"""Values of MXFP4 by code; the fourth bit is the sign."""

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
TILE = 128
"""Rows and columns of a float8 tile."""

FP4_MAX_EXPONENT = 2
"""Exponent of the largest MXFP4 value, 1.5 * 2^2."""


Dequantize = Callable[[Tensor, str], Tensor]
"""Function from storage (..., outputs, units) and a format's name to the weight, bfloat16 (..., outputs, inputs)."""


class ScaledCodes(NamedTuple):
    """Codes uint8 (..., blocks, bytes), and their blocks' scales (..., blocks)."""

    codes: Tensor
    scales: Tensor


def _return_storage(stored: Tensor) -> Tensor:
    return stored


@dataclass(frozen=True)
class ComputeFormat:
    """Storage as the weight itself, in the compute dtype; `fetch` returns it on the device, if it is elsewhere."""

    fetch: Callable[[Tensor], Tensor] = _return_storage

    def load(self, stored: Tensor, dequantize: Dequantize) -> Tensor:
        """Return the weight on the device."""
        return self.fetch(stored)


@dataclass(frozen=True)
class WeightFormat:
    """
    A quantized format: `units` bfloat16 numbers store `block` elements in a row.

    `encode` maps float32 (outputs, inputs) to codes, uint8 (outputs, blocks, bytes), and scales (outputs, blocks);
    `decode` maps codes and scales with any leading dimensions to float32 (..., blocks, block). `fetch` returns storage
    on the device, if it is elsewhere.
    """

    name: str
    block: int
    units: int
    scale_dtype: torch.dtype
    encode: Callable[[Tensor], ScaledCodes]
    decode: Callable[[Tensor, Tensor], Tensor]
    fetch: Callable[[Tensor], Tensor] = _return_storage

    def storage_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return a weight's storage shape. Raises ValueError unless whole blocks fill a row."""
        blocks, rest = divmod(shape[-1], self.block)
        if rest:
            raise ValueError(f"rows of {shape[-1]} elements can't be divided into blocks of {self.block}")
        return (*shape[:-1], blocks * self.units)

    def weight_shape(self, storage: tuple[int, ...]) -> tuple[int, ...]:
        """Return the weight's shape for a storage shape."""
        return (*storage[:-1], storage[-1] // self.units * self.block)

    def quantize(self, weight: Tensor) -> Tensor:
        """Return the storage (..., outputs, units) for a floating-point weight (..., outputs, inputs)."""
        self.storage_shape(tuple(weight.shape))  # checks the width
        matrices = weight if weight.ndim > 2 else weight[None]
        flat = matrices.flatten(0, -3)
        stored = torch.stack([self.pack_storage(*self.encode(matrix.float().contiguous())) for matrix in flat])
        return stored.view(*weight.shape[:-1], -1)

    def pack_storage(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return storage (..., units) from codes uint8 (..., blocks, bytes) and scales (..., blocks)."""
        heads = scales.to(self.scale_dtype).unsqueeze(-1).contiguous().view(torch.uint8)
        return torch.cat([heads, codes], -1).view(STORAGE).flatten(-2)

    def unpack_storage(self, stored: Tensor) -> ScaledCodes:
        """Return codes and scales, the arguments of `pack_storage`, from storage (..., units)."""
        blocks = split_into_blocks(stored.contiguous().view(torch.uint8), self.units * STORAGE.itemsize)
        heads, codes = blocks.tensor_split([self.scale_dtype.itemsize], -1)
        return ScaledCodes(codes, heads.contiguous().view(self.scale_dtype).squeeze(-1))

    def dequantize(self, stored: Tensor) -> Tensor:
        """Return the weight (..., outputs, inputs), bfloat16, from its storage (..., outputs, units)."""
        return self.decode(*self.unpack_storage(stored)).to(STORAGE).flatten(-2)

    def load(self, stored: Tensor, dequantize: Dequantize) -> Tensor:
        """Return the weight on the device from its storage, which may be elsewhere."""
        return dequantize(self.fetch(stored), self.name)


StorageFormat = ComputeFormat | WeightFormat
"""Format of a frozen weight's storage."""


def split_into_blocks(rows: Tensor, size: int) -> Tensor:
    """Reshape (..., blocks * size) to (..., blocks, size)."""
    return rows.reshape(*rows.shape[:-1], -1, size)


@cache
def _upload_values(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, device=device)


def _encode_nf4(weight: Tensor) -> ScaledCodes:
    table = _upload_values(NF4_VALUES, weight.device)
    blocks = split_into_blocks(weight, NF4.block)
    scales = blocks.abs().amax(-1)
    # bitsandbytes multiplies by the inverse, and rounds a midpoint down.
    relative = blocks * (1 / scales.clamp_min(1e-38)).unsqueeze(-1)
    codes = torch.bucketize(relative, (table[:-1] + table[1:]) / 2, out_int32=True).to(torch.uint8)
    return ScaledCodes(codes[..., ::2] << 4 | codes[..., 1::2], scales)


def _decode_nf4(codes: Tensor, scales: Tensor) -> Tensor:
    both = torch.stack([codes >> 4, codes & 15], -1).flatten(-2)
    return _upload_values(NF4_VALUES, codes.device)[both.int()] * scales.unsqueeze(-1)


def _encode_float8(weight: Tensor) -> ScaledCodes:
    rows = len(weight)
    tiles = F.pad(weight, (0, 0, 0, -rows % TILE)).view(-1, TILE, weight.shape[1] // TILE, TILE)
    largest = tiles.abs().amax((1, 3))
    scales = (largest / E4M3_MAX).masked_fill(largest == 0, 1.0).repeat_interleave(TILE, 0)[:rows]
    relative = split_into_blocks(weight, TILE) / scales.unsqueeze(-1)
    return ScaledCodes(relative.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).view(torch.uint8), scales)


def _decode_float8(codes: Tensor, scales: Tensor) -> Tensor:
    return codes.view(E4M3).float() * scales.unsqueeze(-1)


def _encode_mxfp4(weight: Tensor) -> ScaledCodes:
    magnitudes = _upload_values(FP4_MAGNITUDES, weight.device)
    blocks = split_into_blocks(weight, MXFP4.block)
    largest = blocks.abs().amax(-1)
    # frexp's mantissa is from 0.5 to 1; the smallest scale keeps quotients of zeros finite.
    exponents = largest.frexp().exponent - 1 - FP4_MAX_EXPONENT
    scales = torch.ldexp(torch.ones_like(largest), exponents.clamp_min(-126))
    relative = (blocks / scales.unsqueeze(-1)).clamp(-6.0, 6.0)
    midpoints = (magnitudes[:-1] + magnitudes[1:]) / 2
    # Ties go to the even code: `right` counts a midpoint in the upper interval.
    down = torch.bucketize(relative.abs(), midpoints, out_int32=True)
    up = torch.bucketize(relative.abs(), midpoints, out_int32=True, right=True)
    codes = torch.where(down % 2 == 0, down, up) | (relative.signbit().int() << 3)
    codes = codes.to(torch.uint8)
    return ScaledCodes(codes[..., ::2] | codes[..., 1::2] << 4, scales)


def _decode_mxfp4(codes: Tensor, scales: Tensor) -> Tensor:
    both = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    return _upload_values(FP4_VALUES, codes.device)[both.int()] * scales.float().unsqueeze(-1)


NF4 = WeightFormat("nf4", 64, 18, torch.float32, _encode_nf4, _decode_nf4)
"""4 bits in blocks of 64 with a float32 scale, 4.5 bits per element; a byte's upper half is first."""

FLOAT8 = WeightFormat("float8", TILE, 66, torch.float32, _encode_float8, _decode_float8)
"""e4m3 in tiles of 128 x 128 with a float32 scale, 8.25 bits per element."""

MXFP4 = WeightFormat("mxfp4", 32, 9, torch.bfloat16, _encode_mxfp4, _decode_mxfp4)
"""4 bits in blocks of 32 with a power of two as the scale, 4.5 bits per element; a byte's lower half is first."""

FormatName = Literal["nf4", "float8", "mxfp4"]
FORMATS_IN_WORDS = (
    "'nf4', 4 bits in blocks of 64; 'float8', 8 bits in tiles of 128 x 128; 'mxfp4', 4 bits in blocks of 32"
)

FORMATS = {weight_format.name: weight_format for weight_format in (NF4, FLOAT8, MXFP4)}


Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Function from rows (..., width), a dequantized weight and a bias to rows."""

Gradient = Callable[[Tensor, Tensor], Tensor]
"""Function from gradients (..., outputs) and a dequantized weight to gradients (..., width)."""

GroupedGemm = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
"""`grouped_gemm_eager`, or another implementation of it."""


def dequantize_eager(stored: Tensor, name: str) -> Tensor:
    """Return the weight, bfloat16 (..., outputs, inputs), with storage (..., outputs, units) in the format `name`."""
    return FORMATS[name].dequantize(stored)


def linear_quantized(
    dequantize: Dequantize, x: Tensor, stored: Tensor, weight_format: StorageFormat, bias: Tensor | None = None
) -> Tensor:
    """
    Return x @ weight.T + bias (..., outputs), in x's dtype: x (..., inputs), the weight's storage (outputs, units).
    """
    return _multiply_by_dequantized_weight(x, stored, weight_format, dequantize, _linear, torch.matmul, bias)


def multiply_quantized_experts(
    dequantize: Dequantize,
    grouped_gemm: GroupedGemm,
    x: Tensor,
    stored: Tensor,
    weight_format: StorageFormat,
    offsets: Tensor,
) -> Tensor:
    """
    Multiply x (rows, inputs), sorted by expert, by the experts' weights, with storage (experts, outputs, units).

    offsets int32 (experts,) are the ends of the experts' rows. Returns (rows, outputs).
    """

    def multiply_rows_by_expert(rows: Tensor, weight: Tensor, _: Tensor | None) -> Tensor:
        return grouped_gemm(rows, weight, offsets, True)

    def multiply_grads_by_expert(rows: Tensor, weight: Tensor) -> Tensor:
        return grouped_gemm(rows, weight, offsets, False)

    return _multiply_by_dequantized_weight(
        x, stored, weight_format, dequantize, multiply_rows_by_expert, multiply_grads_by_expert
    )


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = F.linear(x, weight, bias)
    # Callers may not change a view that a Function returns in place.
    return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y


def _multiply_by_dequantized_weight(
    x: Tensor,
    stored: Tensor,
    weight_format: StorageFormat,
    dequantize: Dequantize,
    product: Product,
    gradient: Gradient,
    bias: Tensor | None = None,
) -> Tensor:
    unpack = partial(weight_format.load, dequantize=dequantize)
    result: Tensor = _Product.apply(x, stored, bias, unpack, product, gradient)  # type: ignore[no-untyped-call]
    return result


class _Product(Function):
    """Product with a frozen weight; `gradient` multiplies by the same weight in the other direction."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        stored: Tensor,
        bias: Tensor | None,
        unpack: Callable[[Tensor], Tensor],
        product: Product,
        gradient: Gradient,
    ) -> Tensor:
        """Return rows (..., outputs): x (..., inputs), the weight's storage, any shape, and bias (outputs,)."""
        ctx.save_for_backward(stored)
        ctx.unpack, ctx.gradient = unpack, gradient
        return product(x, unpack(stored), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (stored,) = ctx.saved_tensors
        grad_x = ctx.gradient(grad, ctx.unpack(stored)) if ctx.needs_input_grad[0] else None
        grad_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, None, grad_bias, None, None, None
