"""Frozen weights in quantized formats (QLoRA)."""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from fnmatch import fnmatchcase
from typing import ClassVar

import attrs
import torch
from torch import nn

from drawloom import NodeView, Problem, UserError, component, setting
from drawloom.components.frozen_weights.layers import find_storable_weights, set_format
from drawloom.components.model.decoder.experts import Experts
from drawloom.components.model.layers import Linear
from drawloom.components.parallel.cut_blocks import compute_first_rank_slice, describe_cut_block
from drawloom.components.parallel.master_weights import choose_layer_dtype
from drawloom.kernels.weight_formats.eager import FORMATS, FORMATS_IN_WORDS, FormatName, WeightFormat
from drawloom.ports import NamePatterns, Precision, RankSlice, StageFeature, StageNodes, TensorSlice, WrappingOrder

Weights = dict[str, tuple[Linear | Experts, str]]
"""Layers and parameter names by weight name."""


@component
class QuantizedWeights(StageFeature):
    """
    Frozen weights of linear layers and experts in a quantized format, which is dequantized for each product (QLoRA).

    Embedding, head, norms, routers and biases stay as they are, and so do all weights that an adapter trains itself.
    """

    order: ClassVar[WrappingOrder] = WrappingOrder.STORAGE
    excludes: ClassVar[Mapping[str, str]] = {"stages.compiled": "torch.compile does not trace quantized weights"}
    keeps_layer_shapes: ClassVar[bool] = True

    format: FormatName = setting(FORMATS_IN_WORDS, default="nf4", impact="incompatible")
    exclude: tuple[str, ...] = setting(
        'name patterns of weights that stay in the compute dtype: "*.self_attn.*", "*.down_proj.weight"',
        default=(),
        impact="incompatible",
    )

    @classmethod
    def check_stages(cls, feature: NodeView, nodes: StageNodes) -> Iterator[Problem]:
        """Yield problems for recipes whose frozen weights can't be quantized."""
        yield from nodes.check_some_weights_are_frozen(feature)
        name = feature.settings["format"]
        if (compute := nodes.compute_dtype) not in (None, "bfloat16") and nodes.precision is not None:
            text = f"layers compute in {compute!r}, and frozen weights in {name} are dequantized to bfloat16"
            yield nodes.precision.problem("compute", text, f"write compute = 'bfloat16', or remove [{feature.name}]")
        chosen, storable = _find_weights_of_nodes(feature, nodes)
        yield from _name_patterns(feature.settings["exclude"], storable).check(feature)
        for weight, (layer, leaf) in chosen.items():
            shape = tuple(layer.get_parameter(leaf).shape)
            first = compute_first_rank_slice(layer, leaf, nodes.sizes.tensor)
            if fault := describe_block_fault(FORMATS[name], first, shape):
                yield feature.problem("format", f"{weight} {fault}", f"{_format_remedy(weight)}, or another format")
                return

    @classmethod
    def describe_stages(cls, feature: NodeView, nodes: StageNodes) -> Iterator[str]:
        """Yield how many model weights are stored in the quantized format, and their bytes."""
        if not (chosen := _find_weights_of_nodes(feature, nodes)[0]):
            return
        weight_format = FORMATS[feature.settings["format"]]
        elements = sum(layer.get_parameter(leaf).numel() for layer, leaf in chosen.values())
        bits = 16 * weight_format.units / weight_format.block
        yield (
            f"{weight_format.name}: {len(chosen)} frozen weights, {elements:,} elements of {bits:g} bits; what an "
            "adapter trains itself stays as it is"
        )

    def convert(self, module: nn.Module, precision: Precision, splits: MutableMapping[str, RankSlice]) -> None:
        """Replace frozen weights by their storage; slices of weights in `splits` become slices of storage."""
        weight_format = FORMATS[self.format]
        for name, (layer, leaf) in _select_weights(module, precision, self.exclude).items():
            weight, split = layer.get_parameter(leaf), splits.get(name)
            if weight.requires_grad:
                continue
            weight_slice = None if split is None else split.tensor_slice
            if fault := describe_block_fault(weight_format, weight_slice, tuple(weight.shape)):
                raise UserError(f"frozen_weights.quantized: {name} {fault}; {_format_remedy(name)}", exit_code=2)
            if split is not None:
                stored_slice = compute_storage_slice(weight_format, split.tensor_slice)
                splits[name] = attrs.evolve(split, tensor_slice=stored_slice)
            stored = weight.new_empty(weight_format.storage_shape(tuple(weight.shape)))
            setattr(layer, leaf, nn.Parameter(stored, requires_grad=False))
            set_format(layer, leaf, weight_format)

    def name_patterns(self, modules: Sequence[nn.Module]) -> Iterator[NamePatterns]:
        yield _name_patterns(self.exclude, [name for module in modules for name in find_storable_weights(module)])

    def describe_model(self, whole: nn.Module, precision: Precision) -> Iterator[str]:
        if chosen := _select_weights(whole, precision, self.exclude):
            yield f"{len(chosen)} frozen weights in {self.format}"
        for layer, leaf in chosen.values():
            set_format(layer, leaf, FORMATS[self.format])


def _select_weights(module: nn.Module, precision: Precision, exclude: Sequence[str]) -> Weights:
    """Return the weights to quantize if they are frozen: not excluded, and used in bfloat16."""
    return {
        name: weight
        for name, weight in find_storable_weights(module).items()
        if not any(fnmatchcase(name, pattern) for pattern in exclude)
        and choose_layer_dtype(name, precision) == torch.bfloat16
    }


def _find_weights_of_nodes(feature: NodeView, nodes: StageNodes) -> tuple[Weights, Weights]:
    """Return the weights in the recipe's model to quantize, and all candidates; none for an unknown model."""
    precision, module = nodes.build_precision(), nodes.build_whole_model_on_meta()
    if precision is None or module is None:
        return {}, {}
    return _select_weights(module, precision, feature.settings["exclude"]), find_storable_weights(module)


def _name_patterns(patterns: Sequence[str], names: Sequence[str] | Weights) -> NamePatterns:
    kind = "weight of a linear layer or experts"
    return NamePatterns("frozen_weights.quantized", "exclude", kind, patterns, [*names])


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
    return describe_cut_block(weight_slice, f"{name} has", block)


def _format_remedy(name: str) -> str:
    """Return the remedy for a weight without quantization: a pattern to keep it in the compute dtype."""
    owner, _, leaf = name.rpartition(".")
    return f'write exclude = ["*.{owner.rpartition(".")[2]}.{leaf}"]'
