"""
Sources for folders whose tensors differ from the model's: quantized weights, or the text model of a larger model.

Quantized are bitsandbytes' NF4, float8 in tiles (DeepSeek, Qwen) and gpt-oss's MXFP4.

Formats are described in `kernels/weight_formats/eager.py`.
"""

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import attrs
import torch
from torch import Tensor

from drawloom import UserError
from drawloom.components.storage.tensor_source import TensorSource, TensorSpec
from drawloom.kernels.weight_formats.eager import (
    E4M3,
    FLOAT8,
    MXFP4,
    NF4,
    NF4_VALUES,
    TILE,
    WeightFormat,
    split_into_blocks,
)

STYLES: tuple[tuple[tuple[str, str], ...], ...] = (
    (("model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")),
    (("model.", "model.language_model."),),
)
"""Prefixes in a text model, and those in files of a multimodal model: the forms of transformers 4 and 5."""

NameNesting = Iterable[tuple[str, str]]


def find_multimodal_prefixes(names: Iterable[str], needed: Collection[str] = ()) -> NameNesting:
    """Return (text prefix, prefix in files) pairs for these names; () if none is nested or a model needs such names."""
    names = list(names)
    for style in STYLES:
        marker = style[0][1]
        if any(name.startswith(marker) for name in names) and not any(name.startswith(marker) for name in needed):
            return style
    return ()


def to_multimodal_name(name: str, style: NameNesting) -> str:
    """Return the name in files of the multimodal model for a tensor of the text model."""
    for inner, outer in style:
        if name.startswith(inner):
            return outer + name.removeprefix(inner)
    return name


def to_text_name(name: str, style: NameNesting) -> str:
    """Return the name in the text model for a tensor in files of the multimodal model; other parts keep theirs."""
    for inner, outer in style:
        if name.startswith(outer):
            return inner + name.removeprefix(outer)
    return name


@attrs.frozen(slots=False)
class TextTensors:
    """Source with a multimodal model's text tensors under a text model's names, unless `needed` has nested names."""

    source: TensorSource
    needed: Collection[str]

    @cached_property
    def _file_names_by_text_name(self) -> dict[str, str]:
        """Names in files by names in the text model."""
        names = list(self.source.specs())
        style = find_multimodal_prefixes(names, self.needed)
        return {to_text_name(name, style): name for name in names}

    def specs(self) -> Mapping[str, TensorSpec]:
        specs = self.source.specs()
        return {name: specs[original] for name, original in self._file_names_by_text_name.items()}

    def tensor(self, name: str) -> Tensor:
        return self.source.tensor(self._file_names_by_text_name[name])


BITS = torch.int16
"""Dtype in which mappers move storage: rows of numbers that are not values."""

NF4_STATE, OTHER_STATE = ".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__"
TILE_SCALES = "_scale_inv"
BLOCKS, SCALES = "_blocks", "_scales"
EXPONENT_BIAS = 127


@attrs.frozen
class QuantizedTensor:
    """
    Quantized tensor in a folder: its spec when dequantized, and the names of its codes and scales in files.

    `read_packed_storage` returns its codes and scales (..., outputs, units). A `transposed` tensor is (..., inputs,
    outputs) in files.
    """

    spec: TensorSpec
    weight_format: WeightFormat
    parts: tuple[str, ...]
    read_packed_storage: Callable[[], Tensor]
    transposed: bool = False

    @property
    def storage_spec(self) -> TensorSpec:
        shape = self._transpose_if_needed(torch.empty(self.spec.shape, device="meta")).shape
        stored = torch.empty(self.weight_format.storage_shape(tuple(shape)), device="meta")
        return TensorSpec(tuple(self._transpose_if_needed(stored).shape), BITS)

    def read_storage(self) -> Tensor:
        """Return the quantized storage (codes and scales) as BITS, transposed if the tensor is."""
        return self._transpose_if_needed(self.read_packed_storage().view(BITS))

    def read_dequantized(self) -> Tensor:
        """Return the values, bfloat16."""
        return self._transpose_if_needed(self.weight_format.dequantize(self.read_packed_storage()))

    def _transpose_if_needed(self, tensor: Tensor) -> Tensor:
        """Swap the last two dimensions if the tensor is transposed in files."""
        return tensor.transpose(-1, -2) if self.transposed else tensor


@attrs.frozen(slots=False)
class DequantizedSource:
    """
    Source in which each quantized tensor of another source is one bfloat16 tensor.

    Tensors named in `stored` are not dequantized: they are their storage's rows, as BITS.
    """

    source: TensorSource
    stored: frozenset[str] = frozenset()

    @cached_property
    def quantized_tensors(self) -> Mapping[str, QuantizedTensor]:
        """Quantized tensors by the name of the dequantized tensor. Raises UserError for an unsupported format."""
        specs = self.source.specs()
        return {
            name: tensor
            for find in (_find_nf4_weights, _find_float8_weights, _find_mxfp4_weights)
            for name, tensor in find(self.source, specs)
        }

    def specs(self) -> Mapping[str, TensorSpec]:
        hidden = {part for tensor in self.quantized_tensors.values() for part in tensor.parts}
        plain = {name: spec for name, spec in self.source.specs().items() if name not in hidden}
        return plain | {
            name: tensor.storage_spec if name in self.stored else tensor.spec
            for name, tensor in self.quantized_tensors.items()
        }

    def tensor(self, name: str) -> Tensor:
        if name not in self.quantized_tensors:
            return self.source.tensor(name)
        tensor = self.quantized_tensors[name]
        return tensor.read_storage() if name in self.stored else tensor.read_dequantized()


Specs = Mapping[str, TensorSpec]
NamedQuantizedTensors = Iterator[tuple[str, QuantizedTensor]]


def _find_nf4_weights(source: TensorSource, specs: Specs) -> NamedQuantizedTensors:
    """
    Find bitsandbytes' NF4 weights; yield their names and tensors. Raises UserError for other bitsandbytes formats.

    `W` is uint8 (elements / 2, 1); `W.absmax` has the blocks' scales, float32, or uint8 if they are quantized again, in
    blocks of 256; a JSON text in bytes has the shape.
    """
    for key in specs:
        name, marker, kind = key.rpartition(OTHER_STATE)
        if not marker:
            continue
        if kind != NF4.name:
            raise UserError(
                f"{name} is in bitsandbytes' format {kind}, but only nf4 is supported; use a folder "
                "with nf4 weights, or without quantization"
            )
        state = json.loads(bytes(source.tensor(key).tolist()))
        shape = tuple(state["shape"])
        if state["blocksize"] != NF4.block or shape[-1] % NF4.block:
            text = f"{name} has rows of {shape[-1]} elements in blocks of {state['blocksize']}"
            raise UserError(
                f"{text}, and only rows of whole blocks of {NF4.block} can be read; use a folder without quantization"
            )
        ends = ("", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", NF4_STATE)
        parts = tuple(name + end for end in ends if name + end in specs)

        def read_packed_storage(name: str = name, shape: tuple[int, ...] = shape, state: Any = state) -> Tensor:
            """Read the weight's storage: codes and scales, not yet dequantized."""
            return _read_nf4_storage(source, name, shape, state)

        yield name, QuantizedTensor(TensorSpec(shape, torch.bfloat16), NF4, parts, read_packed_storage)


def _read_nf4_storage(source: TensorSource, name: str, shape: tuple[int, ...], state: Mapping[str, Any]) -> Tensor:
    """Read an NF4 weight's codes and scales as its storage. Raises UserError for another code table."""
    codes, scales = source.tensor(name), source.tensor(f"{name}.absmax")
    if not torch.equal(source.tensor(f"{name}.quant_map"), torch.tensor(NF4_VALUES)):
        raise UserError(
            f"{name}.quant_map is not the NF4 table; use a folder whose weights are in nf4, or not quantized"
        )
    if "nested_offset" in state:
        values, largest = (source.tensor(f"{name}.nested_{part}") for part in ("quant_map", "absmax"))
        repeated = largest.repeat_interleave(state["nested_blocksize"])[: len(scales)]
        scales = values[scales.int()] * repeated + state["nested_offset"]
    blocks = (*shape[:-1], shape[-1] // NF4.block)
    # The storage of codes may have another dtype, for FSDP.
    return NF4.pack_storage(codes.view(torch.uint8).view(*blocks, NF4.block // 2), scales.view(blocks))


def _find_float8_weights(source: TensorSource, specs: Specs) -> NamedQuantizedTensors:
    """Find weights `W` in e4m3 (..., outputs, inputs) with scales `W_scale_inv` for 128 x 128 tiles."""
    for name, spec in specs.items():
        scales = name + TILE_SCALES
        if spec.dtype != E4M3 or scales not in specs:
            continue
        tiles = tuple(math.ceil(size / TILE) for size in spec.shape[-2:])
        if specs[scales].shape != (*spec.shape[:-2], *tiles) or spec.shape[-1] % TILE:
            text = f"{name} is {spec.shape} with scales {specs[scales].shape}"
            raise UserError(
                f"{text}, and only scales of tiles of {TILE} x {TILE} can be read; use a folder without quantization"
            )

        def read_packed_storage(name: str = name, shape: tuple[int, ...] = spec.shape) -> Tensor:
            by_row = source.tensor(name + TILE_SCALES).float().repeat_interleave(TILE, -2)[..., : shape[-2], :]
            codes = source.tensor(name).contiguous().view(torch.uint8)
            return FLOAT8.pack_storage(split_into_blocks(codes, TILE), by_row)

        yield name, QuantizedTensor(TensorSpec(spec.shape, torch.bfloat16), FLOAT8, (name, scales), read_packed_storage)


def _find_mxfp4_weights(source: TensorSource, specs: Specs) -> NamedQuantizedTensors:
    """
    Yield pairs `X_blocks`, uint8 (experts, outputs, groups, 16), and `X_scales`, exponents uint8 (experts, outputs,
    groups), as tensors X (experts, inputs, outputs), as in the files of gpt-oss without quantization.
    """
    for key, spec in specs.items():
        name = key.removesuffix(BLOCKS)
        if name == key or name + SCALES not in specs:
            continue

        def read_packed_storage(name: str = name) -> Tensor:
            exponents = source.tensor(name + SCALES).int() - EXPONENT_BIAS
            scales = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
            return MXFP4.pack_storage(source.tensor(name + BLOCKS), scales)

        experts, outputs, groups, size = spec.shape
        turned = TensorSpec((experts, 2 * groups * size, outputs), torch.bfloat16)
        yield name, QuantizedTensor(turned, MXFP4, (name + BLOCKS, name + SCALES), read_packed_storage, transposed=True)
