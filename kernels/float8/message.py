"""
Messages with weights, some in float8: elements in e4m3 and a power-of-two scale per row.

A float8 element times its scale is exact in bfloat16, and quantizing the product by rows again gives the same number,
so a layer that multiplies in float8 gets the weights that it would compute itself.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from drawloom.kernels.float8.eager import E4M3, choose_float8_kernels

ALIGNMENT = 16
"""Message sizes in bytes are multiples."""

MANTISSA_BITS = {torch.float32: 23, torch.bfloat16: 7}
"""Bits below the exponent."""


def pack_weights(weights: Sequence[Tensor], widths: Sequence[int]) -> Tensor:
    """
    Return a message, uint8 (bytes,), with flat bfloat16 weights (n,).

    Weights with a row width other than 0 are quantized to float8 by rows.
    """
    kernels = choose_float8_kernels(weights[0].device)
    rows = [
        kernels.quantize_rows(weight.view(-1, width), False)
        for weight, width in zip(weights, widths, strict=True)
        if width
    ]
    plain = [weight.view(torch.uint8) for weight, width in zip(weights, widths, strict=True) if not width]
    exponents = [(part.scale.view(torch.int32) >> MANTISSA_BITS[torch.float32]).to(torch.uint8) for part in rows]
    parts = [*plain, *(part.data.view(torch.uint8).view(-1) for part in rows), *exponents]
    size = sum(map(len, parts))
    return torch.cat([*parts, parts[0].new_zeros(-size % ALIGNMENT)])


def unpack_weights(messages: Tensor, outputs: Sequence[Tensor], widths: Sequence[int]) -> None:
    """Fill outputs, bfloat16 (ranks, n), from all ranks' messages, uint8 (ranks, bytes)."""
    quantized = [(output, width) for output, width in zip(outputs, widths, strict=True) if width]
    plain = [output for output, width in zip(outputs, widths, strict=True) if not width]
    sizes = [output.shape[1] * output.itemsize for output in plain]
    sizes += [output.shape[1] for output, _ in quantized]
    sizes += [output.shape[1] // width for output, width in quantized]
    parts = [*torch.split(messages[:, : sum(sizes)], sizes, 1)]
    for output in plain:
        output.copy_(parts.pop(0).view(output.dtype))
    for (output, width), elements, exponents in zip(quantized, parts, parts[len(quantized) :], strict=False):
        scale = (exponents.to(torch.int16) << MANTISSA_BITS[torch.bfloat16]).view(torch.bfloat16)
        shape = len(output), -1, width
        torch.mul(elements.view(E4M3).to(torch.bfloat16).view(shape), scale.unsqueeze(2), out=output.view(shape))
