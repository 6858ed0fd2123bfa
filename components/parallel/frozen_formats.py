"""A module's frozen weights in quantized formats (QLoRA)."""

from collections.abc import Iterator, MutableMapping
from fnmatch import fnmatchcase

import attrs
import torch
from torch import nn

from drawloom.components.parallel.data_shard import find_untied_heads
from drawloom.components.parallel.master_weights import choose_layer_dtype
from drawloom.components.parallel.tensor import TensorParallel
from drawloom.components.ports.distributed import Precision
from drawloom.components.ports.features import StageNodes
from drawloom.components.ports.model import QuantizableLayer
from drawloom.components.ports.slices import RankSlice, TensorSlice
from drawloom.graph import Problem, UserError
from drawloom.kernels.weight_formats import FORMATS, WeightFormat


def find_quantizable_weights(module: nn.Module) -> dict[str, tuple[QuantizableLayer, str]]:
    """Return layers and parameter names by weight name, for weights that can be quantized: no heads and no routers."""
    heads: set[object] = set(find_untied_heads(module))
    return {
        f"{path}.{leaf}": (layer, leaf)
        for path, layer in module.named_modules()
        if isinstance(layer, QuantizableLayer) and layer not in heads
        for leaf in layer.quantizable
    }


def select_weights_to_quantize(module: nn.Module, precision: Precision) -> dict[str, tuple[QuantizableLayer, str]]:
    """Return the weights for which the recipe chooses a quantized format if they are frozen."""
    if precision.frozen == "compute":
        return {}
    return {
        name: weight
        for name, weight in find_quantizable_weights(module).items()
        if not any(fnmatchcase(name, pattern) for pattern in precision.frozen_in_compute)
        and choose_layer_dtype(name, precision) == torch.bfloat16
    }


def replace_by_quantized_storage(
    module: nn.Module, precision: Precision, splits: MutableMapping[str, RankSlice]
) -> None:
    """
    Replace frozen weights in a stage's meta module by their storage, after ranks have split them.

    `splits` are the ranks' slices by name; for quantized weights they become slices of storage. Raises UserError for a
    weight whose slice does not consist of whole blocks.
    """
    for name, (layer, leaf) in select_weights_to_quantize(module, precision).items():
        weight = module.get_parameter(name)
        if weight.requires_grad:
            continue
        weight_format, split = FORMATS[precision.frozen], splits.get(name)
        weight_slice = None if split is None else split.tensor_slice
        if fault := describe_block_fault(weight_format, weight_slice, tuple(weight.shape)):
            raise UserError(
                f"precision.frozen: {name} {fault}; {suggest_leaving_weight_unquantized(name)}", exit_code=2
            )
        if split is not None:
            splits[name] = attrs.evolve(split, tensor_slice=compute_storage_slice(weight_format, split.tensor_slice))
        stored = weight.new_empty(weight_format.storage_shape(tuple(weight.shape)))
        setattr(module.get_submodule(name.rpartition(".")[0]), leaf, nn.Parameter(stored, requires_grad=False))
        layer.weight_formats = {**layer.weight_formats, leaf: weight_format}


def compute_storage_slice(weight_format: WeightFormat, weight_slice: TensorSlice) -> TensorSlice:
    """Return the storage slice for a weight slice with whole blocks."""
    *offsets, column = weight_slice.offsets
    return TensorSlice(
        weight_format.storage_shape(weight_slice.shape),
        (*offsets, column // weight_format.block * weight_format.units),
        weight_format.storage_shape(weight_slice.size),
    )


def describe_block_fault(weight_format: WeightFormat, weight_slice: TensorSlice | None, shape: tuple[int, ...]) -> str:
    """Return why a weight, or a rank's slice of it, can't consist of whole blocks, as the end of a sentence, or ""."""
    name, block = weight_format.name, weight_format.block
    if weight_slice is None or weight_slice.size[-1] == weight_slice.shape[-1]:
        return f"has {shape[-1]} columns, and {name} has blocks of {block}" if shape[-1] % block else ""
    first, size = weight_slice.offsets[-1], weight_slice.size[-1]
    if first % block or size % block:
        return f"has columns {first} to {first + size} on one rank along tensor, and {name} has blocks of {block}"
    return ""


def suggest_leaving_weight_unquantized(name: str) -> str:
    """Return the remedy for a weight without quantization: a pattern to keep it in the compute dtype."""
    owner, _, leaf = name.rpartition(".")
    pattern = f"*.{owner.rpartition('.')[2]}.{leaf}"
    return f'write frozen_in_compute = ["{pattern}"], or frozen = "compute"'


def check_frozen_weight_format(nodes: StageNodes) -> Iterator[Problem]:
    """Yield problems in recipes whose frozen weights can't be quantized."""
    if nodes.precision is None or nodes.precision.settings.get("frozen") in (None, "compute"):
        return
    if not nodes.freezes_weights:
        text = f"no weight is frozen, since [{nodes.stages.name}] has no adapters"
        yield nodes.precision.problem(
            "frozen", text, "write adapters, as the recipe finetune_lora does, or remove frozen"
        )
    if compiled := nodes.find_feature("stages.compiled"):
        text = f"torch.compile does not trace quantized weights, which [{nodes.precision.name}] asks for"
        yield compiled.problem("use", text, f'remove [{compiled.name}], or write frozen = "compute"')
    precision, module = nodes.build_precision(), nodes.build_whole_model_on_meta()
    if precision is None or module is None:
        return
    names = list(find_quantizable_weights(module))
    for number, pattern in enumerate(precision.frozen_in_compute):
        if names and not any(fnmatchcase(name, pattern) for name in names):
            text = f"no weight of a linear layer or experts is called {pattern!r}; one is {names[0]!r}"
            yield nodes.precision.problem(("frozen_in_compute", number), text, "write another pattern, or remove it")
    weight_format = FORMATS[precision.frozen]
    for name, (layer, leaf) in select_weights_to_quantize(module, precision).items():
        shape = tuple(module.get_parameter(name).shape)
        first = _get_first_rank_slice(layer, leaf, shape, nodes.sizes.tensor)
        if fault := describe_block_fault(weight_format, first, shape):
            yield nodes.precision.problem("frozen", f"{name} {fault}", suggest_leaving_weight_unquantized(name))
            return


def describe_frozen_weight_format(nodes: StageNodes) -> Iterator[str]:
    """Yield how many model weights are stored in the quantized format, and their bytes."""
    precision, module = nodes.build_precision(), nodes.build_whole_model_on_meta()
    if precision is None or module is None or not (chosen := select_weights_to_quantize(module, precision)):
        return
    units, block = FORMATS[precision.frozen].units, FORMATS[precision.frozen].block
    elements = sum(module.get_parameter(name).numel() for name in chosen)
    bits = 16 * units / block
    yield (
        f"{precision.frozen}: {len(chosen)} frozen weights, {elements:,} elements of {bits:g} bits; what an adapter "
        "trains itself stays as it is"
    )


def _get_first_rank_slice(layer: QuantizableLayer, leaf: str, shape: tuple[int, ...], ranks: int) -> TensorSlice | None:
    """Return the first rank's slice of a weight along `tensor`, or None if it is whole."""
    if ranks == 1 or not isinstance(layer, TensorParallel) or (split := layer.split_dims().get(leaf)) is None:
        return None
    size = [*shape]
    size[split.dim] = -(-shape[split.dim] // split.unit // ranks) * split.unit
    return TensorSlice(shape, (0,) * len(shape), tuple(size))
