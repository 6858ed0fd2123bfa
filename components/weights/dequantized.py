"""Source that reads weights in MXFP4 as bfloat16 (Open Compute Project 2023, "Microscaling Formats", version 1.0)."""

from collections.abc import Mapping
from functools import cached_property

import attrs
import torch
from torch import Tensor

from drawloom.components.storage.tensor_source import TensorSource, TensorSpec

BLOCKS, SCALES = "_blocks", "_scales"
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes by the lower three bits; the fourth bit is the sign."""

EXPONENT_BIAS = 127


@attrs.frozen(slots=False)
class Dequantized:
    """
    Source in which each pair `X_blocks` and `X_scales` of another source is one bfloat16 tensor X.

    Blocks are uint8 (experts, outputs, groups, 16), two values in a byte, the lower half first; scales are exponents,
    uint8 (experts, outputs, groups). X is (experts, inputs, outputs), as in the files of gpt-oss without quantization.
    """

    source: TensorSource

    @cached_property
    def _quantized(self) -> dict[str, TensorSpec]:
        """Specs of blocks by the name of the tensor that they become."""
        specs = self.source.specs()
        names = [name.removesuffix(BLOCKS) for name in specs if name.endswith(BLOCKS)]
        return {name: specs[name + BLOCKS] for name in names if name + SCALES in specs}

    def specs(self) -> Mapping[str, TensorSpec]:
        hidden = {name + end for name in self._quantized for end in (BLOCKS, SCALES)}
        plain = {name: spec for name, spec in self.source.specs().items() if name not in hidden}
        return plain | {name: _spec(blocks.shape) for name, blocks in self._quantized.items()}

    def tensor(self, name: str) -> Tensor:
        if name not in self._quantized:
            return self.source.tensor(name)
        return dequantize_mxfp4(self.source.tensor(name + BLOCKS), self.source.tensor(name + SCALES))


def _spec(blocks: tuple[int, ...]) -> TensorSpec:
    experts, outputs, groups, size = blocks
    return TensorSpec((experts, 2 * groups * size, outputs), torch.bfloat16)


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return bfloat16 (experts, inputs, outputs) from blocks uint8 (experts, outputs, groups, 16) and their scales."""
    table = torch.tensor([*FP4, *(-value for value in FP4)], dtype=torch.bfloat16, device=blocks.device)
    halves = torch.stack([blocks & 0x0F, blocks >> 4], -1).flatten(-2)
    # Powers of two are exact in bfloat16, but ldexp would compute them in float32's range only.
    values = torch.ldexp(table[halves.int()].float(), scales.int().unsqueeze(-1) - EXPONENT_BIAS)
    return values.bfloat16().flatten(-2).transpose(1, 2)
