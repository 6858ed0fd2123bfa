"""Dequantized weights in Triton: one launch reads the storage and writes the bits of the eager function."""

from functools import cache

import torch
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from drawloom.kernels.operation import register_kernel
from drawloom.kernels.triton.primitives import cache_launches, cdiv, load_or_zero
from drawloom.kernels.weight_formats.eager import FORMATS, FP4_VALUES, NF4_VALUES, STORAGE

ELEMENTS = 4096
"""Elements that a program writes."""

VALUES = {"nf4": NF4_VALUES, "mxfp4": FP4_VALUES, "float8": (0.0,)}


def dequantize_triton(stored: Tensor, name: str) -> Tensor:
    """Compute dequantize_eager, bitwise equal, for storage (..., outputs, units) in bfloat16."""
    return _dequantize(stored, name)


@register_kernel(
    "dequantize", lambda stored, name: stored.new_empty(FORMATS[name].weight_shape(tuple(stored.shape)), dtype=STORAGE)
)
def _dequantize(result: Tensor, stored: Tensor, name: str) -> None:
    halves, weight_format = stored.contiguous(), FORMATS[name]
    blocks, per_program = halves.numel() // weight_format.units, ELEMENTS // weight_format.block
    if blocks:
        _dequantize_kernel[(cdiv(blocks, per_program),)](
            halves.view(torch.int16),
            halves.view(torch.uint8),
            _upload_table(VALUES[name], stored.device),
            result,
            blocks,
            FORMAT=name,
            BLOCK=weight_format.block,
            UNITS=weight_format.units,
            PER_PROGRAM=per_program,
        )


@cache
def _upload_table(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, device=device)


# fmt: off
@cache_launches()
def _dequantize_kernel(
    halves, data, table, result, blocks,
    FORMAT: constexpr, BLOCK: constexpr, UNITS: constexpr, PER_PROGRAM: constexpr,
):
    # fmt: on
    block = tl.program_id(0).to(tl.int64) * PER_PROGRAM + tl.arange(0, PER_PROGRAM)
    is_block = block < blocks
    # Gathered storage is aligned to two bytes only.
    low = load_or_zero(halves + block * UNITS, is_block).to(tl.int32) & 0xFFFF
    if FORMAT == "mxfp4":
        scale, head = (low << 16).to(tl.float32, bitcast=True), 2
    else:
        high = load_or_zero(halves + block * UNITS + 1, is_block).to(tl.int32)
        scale, head = (high << 16 | low).to(tl.float32, bitcast=True), 4
    codes = data + block[:, None] * (2 * UNITS) + head
    if FORMAT == "float8":
        code = load_or_zero(codes + tl.arange(0, BLOCK)[None, :], is_block[:, None])
        values = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        code = load_or_zero(codes + tl.arange(0, BLOCK // 2)[None, :], is_block[:, None]).to(tl.int32)
        if FORMAT == "nf4":
            first, second = code >> 4, code & 15
        else:
            first, second = code & 15, code >> 4
        values = tl.join(tl.load(table + first), tl.load(table + second)).reshape(PER_PROGRAM, BLOCK)
    element = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(result + element, (values * scale[:, None]).to(tl.bfloat16), mask=is_block[:, None])
