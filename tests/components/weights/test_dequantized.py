"""Folders with quantized weights: their values, and which bits a module with the same format keeps."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from drawloom.components.ports.model import StoredLayer
from drawloom.components.ports.slices import TensorSlice
from drawloom.components.weights.dequantized import DequantizedSource
from drawloom.components.weights.load import fill_module, open_and_check_folder
from drawloom.components.weights.mapper import chunk, parallel, rename, sequential, transpose, unstack
from drawloom.graph import UserError
from drawloom.kernels.weight_formats.eager import FLOAT8, FORMATS, MXFP4, NF4, NF4_VALUES, WeightFormat
from support.tensor_sources import InMemoryTensors
from support.weight_folders import fill_module_from_folder

BYTE = torch.uint8


def random_bytes(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(seed), dtype=BYTE)


def nf4_tensors(name: str, rows: int, columns: int, nested: bool, **changes: Any) -> dict[str, Tensor]:
    """Return a weight in bitsandbytes' layout, with random codes."""
    blocks = rows * columns // 64
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [rows, columns]}
    tensors = {"": random_bytes(rows * columns // 2, 1), ".quant_map": torch.tensor(NF4_VALUES)}
    if nested:
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 2.6069183349609375}
        tensors |= {".absmax": random_bytes(blocks, seed=1), ".nested_quant_map": torch.linspace(-1, 1, 256)}
        tensors[".nested_absmax"] = torch.rand(-(-blocks // 256))
    else:
        tensors[".absmax"] = torch.rand(blocks)
    text = json.dumps(state | changes).encode()
    kind = (state | changes)["quant_type"]
    tensors[f".quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text), dtype=BYTE)
    return {name + end: tensor for end, tensor in tensors.items()}


def nf4_values(name: str, tensors: Mapping[str, Tensor], rows: int, columns: int) -> Tensor:
    """Return such a weight's values, computed in numpy element by element."""
    absmax = tensors[f"{name}.absmax"].numpy()
    if absmax.dtype == np.uint8:
        table, largest = (tensors[f"{name}.nested_{part}"].numpy() for part in ("quant_map", "absmax"))
        offset = np.float32(2.6069183349609375)
        absmax = np.array([table[q] * largest[i // 256] + offset for i, q in enumerate(absmax)], np.float32)
    values = []
    for index, byte in enumerate(tensors[name].numpy().flatten()):
        values += [np.float32(NF4_VALUES[code]) * absmax[2 * index // 64] for code in (byte >> 4, byte & 15)]
    return torch.tensor(np.array(values)).view(rows, columns).bfloat16()


class Frozen(nn.Module):
    """A layer with a frozen weight, quantized or not."""

    def __init__(self, shape: tuple[int, ...], weight_format: WeightFormat | None) -> None:
        super().__init__()
        stored = shape if weight_format is None else weight_format.storage_shape(shape)
        self.a = type("Layer", (nn.Module, StoredLayer), {})()
        weight = torch.empty(stored, dtype=torch.bfloat16, device="meta")
        self.a.weight = nn.Parameter(weight, requires_grad=False)
        if weight_format is not None:
            self.a.formats = {"weight": weight_format}

    @property
    def weight(self) -> Tensor:
        return self.a.weight  # type: ignore[no-any-return]


@pytest.mark.parametrize("nested", [False, True])
def test_nf4_of_bitsandbytes_is_read_and_kept(nested: bool, tmp_path: Path) -> None:
    """A module in bfloat16 gets the values, and a module in NF4 the codes and scales."""
    shape = (24, 768)
    tensors = nf4_tensors("a.weight", *shape, nested=nested)
    save_file(tensors, tmp_path / "model.safetensors")
    expected = nf4_values("a.weight", tensors, *shape)
    for weight_format in (None, NF4):
        module = Frozen(shape, weight_format)
        fill_module_from_folder(tmp_path, module, rename({"a.weight": "a.weight"}))
        values = module.weight if weight_format is None else NF4.dequantize(module.weight)
        assert torch.equal(values, expected)
    codes, _ = NF4.unpack_storage(module.weight.detach())
    assert torch.equal(codes.flatten(), tensors["a.weight"].flatten())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"quant_type": "fp4"}, "a.weight is in bitsandbytes' format fp4, but only nf4 is supported"),
        ({"blocksize": 128}, "rows of 128 elements in blocks of 128, and only rows of whole blocks of 64"),
        ({"shape": [128, 96]}, "rows of 96 elements in blocks of 64, and only rows of whole blocks of 64"),
    ],
)
def test_other_formats_of_bitsandbytes_are_refused(changes: dict[str, Any], text: str) -> None:
    """FP4, other block sizes, and blocks across rows are errors naming the tensor."""
    source = DequantizedSource(InMemoryTensors(nf4_tensors("a.weight", 96, 128, nested=False, **changes)))
    with pytest.raises(UserError, match=text):
        source.specs()


def test_another_table_of_values_is_refused() -> None:
    """A folder with another NF4 table than bitsandbytes' is an error."""
    tensors = nf4_tensors("a.weight", 8, 128, nested=False)
    tensors["a.weight.quant_map"] = tensors["a.weight.quant_map"].flip(0)
    with pytest.raises(UserError, match=r"a\.weight\.quant_map is not the NF4 table"):
        DequantizedSource(InMemoryTensors(tensors)).tensor("a.weight")


def float8_tensors(name: str, rows: int, columns: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-rows // 128), columns // 128, generator=generator)
    return {name: weight, f"{name}_scale_inv": scales}


def float8_values(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    weight, scales = tensors[name].float(), tensors[f"{name}_scale_inv"]
    for row in range(len(scales)):
        for column in range(scales.shape[1]):
            weight[row * 128 : row * 128 + 128, column * 128 : column * 128 + 128] *= scales[row, column]
    return weight.bfloat16()


def test_float8_tiles_are_read_and_kept_by_experts_and_slices() -> None:
    """Stacked experts, with rows that no tile divides, keep their bits, also in a rank's slice."""
    names = {(expert, half): f"{expert}.{half}" for expert in range(2) for half in ("gate", "up")}
    tensors = {
        key: tensor
        for seed, name in enumerate(names.values())
        for key, tensor in float8_tensors(name, 200, 256, seed).items()
    }
    halves = [chunk(f"e{expert}", [names[expert, "gate"], names[expert, "up"]]) for expert in range(2)]
    mapper = sequential(unstack("a.weight", ["e0", "e1"]), parallel(*halves)).inverse()
    expected = torch.stack(
        [torch.cat([float8_values(names[expert, half], tensors) for half in ("gate", "up")]) for expert in range(2)]
    )
    module = Frozen((2, 400, 256), FLOAT8)
    fill_module(InMemoryTensors(tensors), module, mapper)
    assert torch.equal(FLOAT8.dequantize(module.weight.detach()), expected)
    part = Frozen((1, 400, 256), FLOAT8)
    fill_module(
        InMemoryTensors(tensors),
        part,
        mapper,
        slices={"a.weight": TensorSlice((2, 400, 132), (1, 0, 0), (1, 400, 132))},
    )
    assert torch.equal(part.weight, module.weight[1:])


def test_other_scales_of_float8_are_refused() -> None:
    """A weight in float8 with one scale is an error with both shapes."""
    tensors = {"a.weight": torch.zeros(4, 128).to(torch.float8_e4m3fn), "a.weight_scale_inv": torch.ones(1)}
    with pytest.raises(UserError, match=r"a\.weight is \(4, 128\) with scales \(1,\), and only scales of tiles"):
        DequantizedSource(InMemoryTensors(tensors)).specs()


def test_mxfp4_is_kept_through_a_transpose() -> None:
    """Experts keep their codes through the transpose from files."""
    experts, outputs, inputs = 2, 6, 64
    blocks, scales = (
        random_bytes(experts, outputs, inputs // 32, 16),
        random_bytes(experts, outputs, 2, seed=1) // 8 + 110,
    )
    tensors = {"a.weight_blocks": blocks, "a.weight_scales": scales}
    module = Frozen((experts, outputs, inputs), MXFP4)
    fill_module(InMemoryTensors(tensors), module, transpose("a.weight", 1, 2))
    codes, kept_scales = MXFP4.unpack_storage(module.weight.detach())
    assert torch.equal(codes, blocks)
    assert torch.equal(kept_scales, torch.exp2(scales.float() - 127).bfloat16())


def test_a_quantized_weight_may_be_excluded(tmp_path: Path) -> None:
    """A folder without an excluded weight fits, and the weight stays unchanged."""
    save_file({}, tmp_path / "model.safetensors")
    module = Frozen((24, 768), NF4)
    source = open_and_check_folder(tmp_path, module, rename({}), {"a.weight"})
    fill_module(source, module, rename({}), excluded={"a.weight"})
    assert module.weight.is_meta


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_conversions_inside_of_rows_quantize_again(name: str) -> None:
    """A transposed weight, and a weight in another format, are dequantized, converted and quantized."""
    tensors = float8_tensors("a.weight", 256, 128, 0)
    values = float8_values("a.weight", tensors)
    module = Frozen((128, 256), FORMATS[name])
    fill_module(InMemoryTensors(tensors), module, transpose("a.weight", 0, 1))
    assert torch.equal(module.weight.view(torch.int16), FORMATS[name].quantize(values.t()).view(torch.int16))
