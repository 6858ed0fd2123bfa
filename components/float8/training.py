"""Linear layers and experts whose matrix products run in float8 (FP8 training)."""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import nn

from drawloom import NodeView, Problem, UserError, component, internal, setting
from drawloom.components.float8.layers import (
    Candidate,
    Float8Linear,
    Float8Message,
    allocate_cached_weights,
    count_bytes,
    enable_float8,
    find_float8_candidates,
    get_float8_weights,
)
from drawloom.components.model.decoder.experts import Experts
from drawloom.components.model.decoder.layer import Attention, Block, GatedMlp
from drawloom.components.parallel.master_weights import choose_layer_dtype
from drawloom.components.parallel.tensor_ranks import TensorParallel
from drawloom.kernels.float8.eager import ALIGNMENT, MIN_CAPABILITY, Float8Kernels, lacks_float8
from drawloom.kernels.float8.linear import CachedFloat8Weights, Implementation, choose_float8_kernels
from drawloom.ports import (
    BatchInvariant,
    Device,
    MemoryKind,
    NamePatterns,
    Precision,
    RankSlice,
    StageFeature,
    StageNodes,
    StoredLayer,
    WrappingOrder,
)

Layers = Mapping[str, Candidate]


@component
class Float8Training(StageFeature):
    """
    Linear layers and experts inside of blocks that round both factors of their products to float8 (FP8 training).

    Embedding, head, norms, routers and attention stay in the compute dtype, which is bfloat16.
    """

    order: ClassVar[WrappingOrder] = WrappingOrder.PRODUCTS
    excludes: ClassVar[Mapping[str, str]] = {"stages.compiled": "torch.compile does not trace products in float8"}
    keeps_layer_shapes: ClassVar[bool] = True
    peak_factor: ClassVar[float] = 2.0

    device: Device
    exclude: tuple[str, ...] = setting(
        'name patterns of layers that stay in the compute dtype: "model.layers.0.*", "*.down_proj"', default=()
    )
    round_weights: Literal["pass", "step"] = setting(
        "when weights are rounded: 'pass', in every pass, without memory; 'step', once a step, with 2 bytes per "
        "weight, which saves time with several microbatches or recomputation; the bits are the same",
        default="pass",
        impact="safe",
    )
    gather: bool = setting(
        "whether FSDP ranks gather weights in float8: half the bytes of bfloat16 and one more pass over the "
        "weights; for links slower than the GPU's computation",
        default=False,
        impact="safe",
    )
    implementation: Implementation = setting(
        "implementation of casts, products and norms; products on a GPU are always cuBLAS's", default="auto"
    )
    _cached: list[CachedFloat8Weights] = internal(factory=list)
    _rounded_at: list[int] = internal(factory=list)

    @classmethod
    def check_stages(cls, feature: NodeView, nodes: StageNodes) -> Iterator[Problem]:
        """Yield problems for recipes whose layers can't multiply in float8."""
        if (compute := nodes.compute_dtype) not in (None, "bfloat16") and nodes.precision is not None:
            text = f"layers compute in {compute!r}, and products in float8 accept only bfloat16"
            yield nodes.precision.problem("compute", text, f"write compute = 'bfloat16', or remove [{feature.name}]")
        if feature.settings["round_weights"] == "step" and nodes.sizes.data_shard * nodes.sizes.context > 1:
            text = "shards are gathered for every use, so that nothing can keep their weights in float8"
            yield feature.problem("round_weights", text, 'write round_weights = "pass"')
        for kernels in [] if nodes.model is None else nodes.model.neighbours("kernels"):
            if kernels.implements(BatchInvariant):
                text = f"[{kernels.name}] has no products in float8 that are batch-invariant"
                yield feature.problem("use", text, f'remove [{feature.name}], or write use = "kernels.auto" there')
        device = feature.neighbour("device")
        if feature.settings["implementation"] == "triton" and device and device.settings.get("kind") == "cpu":
            text = "'triton' runs on GPUs, and the device is the CPU"
            yield feature.problem("implementation", text, "write 'auto' or 'eager'")
        streamed = nodes.find_feature("frozen_weights.streamed")
        if streamed and not nodes.find_feature("frozen_weights.quantized"):
            text = "layers that multiply in float8 round weights on the device"
            hint = f'add a table with use = "frozen_weights.quantized", or remove [{feature.name}]'
            yield streamed.problem("use", text, hint)
        yield from cls._check_layers(feature, nodes)

    @classmethod
    def _check_layers(cls, feature: NodeView, nodes: StageNodes) -> Iterator[Problem]:
        """Yield problems for patterns without a layer in the model, and for layers with unsuitable widths."""
        used, candidates = _find_layers_of_nodes(feature, nodes)
        yield from _name_patterns(feature.settings["exclude"], candidates).check(feature)
        for name, layer in used.items():
            for shape in _get_local_weight_shapes(layer, nodes.sizes.tensor):
                if fault := _describe_width_fault(shape):
                    text = f"a weight of {name} {fault}"
                    yield feature.problem("use", text, f"{_format_remedy(name)}, or remove [{feature.name}]")
                    return

    @classmethod
    def describe_stages(cls, feature: NodeView, nodes: StageNodes) -> Iterator[str]:
        """Yield how many linear layers and experts of the model multiply in float8."""
        used, candidates = _find_layers_of_nodes(feature, nodes)
        if used:
            count = _format_layer_count(used, candidates)
            yield f"float8: {count}; MFU is still relative to the peak of bfloat16"

    def check_before_open(self) -> None:
        """Raise UserError for a GPU without products in float8, and for an implementation that can't run on it."""
        device = self.device.device
        if lacks_float8(device):
            capability = torch.cuda.get_device_capability(device)
            has, needs = (f"{major}.{minor}" for major, minor in (capability, MIN_CAPABILITY))
            raise UserError(
                f"float8.training: {torch.cuda.get_device_name(device)} has compute capability {has}, and products in "
                f"float8 need {needs}; remove the table",
                exit_code=2,
            )
        _ = self._kernels

    @cached_property
    def _kernels(self) -> Float8Kernels:
        try:
            return choose_float8_kernels(self.device.device, self.implementation)
        except ValueError as error:
            text = f"float8.training: implementation is {self.implementation!r}, but {error}"
            raise UserError(f"{text}; write implementation = 'auto'", 2) from error

    def convert(self, module: nn.Module, precision: Precision, splits: MutableMapping[str, RankSlice]) -> None:
        for name, layer in _select_layers(module, precision, self.exclude).items():
            # Quantized blocks have multiples of 16 columns, and ranks split no block.
            faults = (
                [] if isinstance(layer, StoredLayer) else map(_describe_width_fault, _get_local_weight_shapes(layer, 1))
            )
            for fault in filter(None, faults):
                raise UserError(f"float8.training: a weight of {name} {fault}; {_format_remedy(name)}", exit_code=2)
            enable_float8(layer, self._kernels)
            if self.gather and isinstance(layer, Float8Linear) and not isinstance(layer, StoredLayer):
                layer.gather_encodings = {"weight": Float8Message()}
        for part in module.modules():
            if isinstance(part, Attention | GatedMlp | Block):
                enable_float8(part, self._kernels)

    def name_patterns(self, modules: Sequence[nn.Module]) -> Iterator[NamePatterns]:
        yield _name_patterns(self.exclude, [name for module in modules for name in find_float8_candidates(module)])

    def allocate(self, modules: Sequence[nn.Module]) -> None:
        if self.round_weights == "step":
            self._cached = [weights for module in modules for weights in allocate_cached_weights(module)]

    def before_passes(self, only_if_changed: bool = False) -> None:
        """Round the cached weights; with `only_if_changed`, only if a step or a load may have changed one."""
        versions = [weight._version for cached in self._cached for weight in cached.weights]
        if only_if_changed and versions == self._rounded_at:
            return
        for cached in self._cached:
            if not cached.is_current or any(weight.requires_grad for weight in cached.weights):
                cached.requantize()
        self._rounded_at = versions

    def after_backward(self) -> None:
        """Let `before_passes` round all trained weights: a fused optimizer updates no version numbers."""
        self._rounded_at = []

    def change_device_bytes(self, sizes: MutableMapping[MemoryKind, int]) -> None:
        sizes["compute_copies"] = sizes.get("compute_copies", 0) + count_bytes(self._cached)

    def describe_model(self, whole: nn.Module, precision: Precision) -> Iterator[str]:
        if used := _select_layers(whole, precision, self.exclude):
            yield _format_layer_count(used, find_float8_candidates(whole))


def _select_layers(module: nn.Module, precision: Precision, exclude: Sequence[str]) -> dict[str, Candidate]:
    """Return the layers that use float8: not excluded, with weights in bfloat16, and no experts that are quantized."""
    return {
        name: layer
        for name, layer in find_float8_candidates(module).items()
        if not any(fnmatchcase(name, pattern) for pattern in exclude)
        and not (isinstance(layer, Experts) and isinstance(layer, StoredLayer))
        and all(choose_layer_dtype(f"{name}.{leaf}", precision) == torch.bfloat16 for leaf in get_float8_weights(layer))
    }


def _find_layers_of_nodes(feature: NodeView, nodes: StageNodes) -> tuple[Layers, Layers]:
    """Return the layers of the recipe's model in float8, and all candidates; none for an unknown model."""
    precision, module = nodes.build_precision(), nodes.build_whole_model_on_meta()
    if precision is None or module is None:
        return {}, {}
    used, candidates = _select_layers(module, precision, feature.settings["exclude"]), find_float8_candidates(module)
    if quantized := nodes.find_feature("frozen_weights.quantized"):
        plain = quantized.settings["exclude"]
        used = {name: layer for name, layer in used.items() if not _are_experts_quantized(name, layer, plain)}
    return used, candidates


def _are_experts_quantized(name: str, layer: Candidate, exclude: Sequence[str]) -> bool:
    """Return whether a layer has experts with quantized weights, which multiply in bfloat16."""
    names = [f"{name}.{leaf}" for leaf in get_float8_weights(layer)]
    is_excluded = all(any(fnmatchcase(weight, pattern) for pattern in exclude) for weight in names)
    return isinstance(layer, Experts) and not is_excluded


def _name_patterns(patterns: Sequence[str], names: Sequence[str] | Layers) -> NamePatterns:
    return NamePatterns("float8.training", "exclude", "linear layer or layer of experts", patterns, [*names])


def _describe_width_fault(shape: tuple[int, ...]) -> str:
    """Return why a weight (..., outputs, inputs) can't be multiplied in float8, as the end of a sentence, or ""."""
    if all(width % ALIGNMENT == 0 for width in shape[-2:]):
        return ""
    return f"is {' x '.join(map(str, shape))} on each rank, and float8 needs widths that are divisible by {ALIGNMENT}"


def _format_remedy(name: str) -> str:
    """Return the remedy for a layer unable to use float8: a pattern to keep it in the compute dtype."""
    return f'write exclude = ["*.{name.rpartition(".")[2]}"]'


def _format_layer_count(used: Layers, candidates: Layers) -> str:
    """Return a sentence such as `14 of 16 linear layers and 4 of 4 layers of experts multiply in float8`."""
    counts = []
    for is_experts, kind in ((False, "linear layers"), (True, "layers of experts")):
        number, total = (
            sum(isinstance(layer, Experts) == is_experts for layer in layers.values()) for layers in (used, candidates)
        )
        if total:
            counts.append(f"{number} of {total} {kind}")
    return f"{' and '.join(counts)} multiply in float8"


def _get_local_weight_shapes(layer: Candidate, ranks: int) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of a layer's weights on a rank along `tensor`."""
    for name, weight in get_float8_weights(layer).items():
        shape = list(weight.shape)
        if ranks > 1 and isinstance(layer, TensorParallel) and (dim := layer.split_dims().get(name)):
            shape[dim.dim] = -(-shape[dim.dim] // ranks)
        yield tuple(shape)
