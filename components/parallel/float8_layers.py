"""The linear layers and experts of a module whose matrix products run in float8."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Self

import attrs
import torch
from torch import nn

from drawloom.components.parallel.data_shard import find_untied_heads
from drawloom.components.parallel.master_weights import choose_layer_dtype
from drawloom.components.parallel.tensor import TensorParallel
from drawloom.components.ports.distributed import Precision
from drawloom.components.ports.features import StageNodes
from drawloom.components.ports.model import Float8Layer, JointLayers, LinearLayer, build_meta_module_if_known
from drawloom.graph import Problem, UserError
from drawloom.graph.wiring.node import NodeView
from drawloom.kernels.experts_float8 import CachedFloat8Experts
from drawloom.kernels.float8 import ALIGNMENT, MIN_CAPABILITY, lacks_float8
from drawloom.kernels.linear_float8 import CachedFloat8Weights


def find_float8_candidates(module: nn.Module) -> dict[str, Float8Layer]:
    """
    Return the linear layers and experts of a stage's module, or of a whole model, that can use float8: no heads and no
    routers.
    """
    heads: set[object] = set(find_untied_heads(module))
    return {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, Float8Layer) and layer.supports_float8 and layer not in heads
    }


def find_float8_layers(module: nn.Module, precision: Precision) -> dict[str, Float8Layer]:
    """Return the layers for which the recipe chooses float8; experts that may be quantized stay in bfloat16."""
    if precision.linear != "float8":
        return {}
    return {
        name: layer
        for name, layer in find_float8_candidates(module).items()
        if not any(fnmatchcase(name, pattern) for pattern in precision.linear_in_compute)
        and (isinstance(layer, LinearLayer) or precision.frozen == "compute")
        and all(choose_layer_dtype(f"{name}.{leaf}", precision) == torch.bfloat16 for leaf in layer.float8_weights())
    }


def enable_float8_layers(module: nn.Module, precision: Precision) -> None:
    """
    Enable float8 in a stage's module, after ranks have split their weights.

    Raises UserError for a layer whose widths tensor cores can't multiply.
    """
    for name, layer in find_float8_layers(module, precision).items():
        for leaf, weight in layer.float8_weights().items():
            if leaf in layer.weight_formats:
                continue  # blocks have multiples of 16 columns, and ranks split no block
            if fault := describe_width_fault(tuple(weight.shape)):
                raise UserError(
                    f"precision.linear: a weight of {name} {fault}; {format_float8_remedy(name)}", exit_code=2
                )
        layer.uses_float8 = True


@attrs.define(eq=False)
class CachedFloat8Layers:
    """Weights whose float8 elements are kept from one update to the next, by operation."""

    _kept: Sequence[CachedFloat8Weights]
    _quantized_at: list[int] = attrs.field(factory=list)

    @classmethod
    def allocate(cls, modules: Iterable[nn.Module], precision: Precision) -> Self:
        """Allocate memory for the weights in stages' real modules, if the recipe keeps them."""
        if precision.linear_weights == "pass":
            return cls([])
        return cls([kept for module in modules for kept in _allocate_float8_weights_by_operation(module, precision)])

    def requantize_weights(self, only_if_changed: bool = False) -> None:
        """Quantize the weights again; with `only_if_changed`, only if a step or a load may have changed one."""
        versions = [weight._version for kept in self._kept for weight in kept.weights]
        if only_if_changed and versions == self._quantized_at:
            return
        for kept in self._kept:
            if not kept.is_current or any(weight.requires_grad for weight in kept.weights):
                kept.requantize()
        self._quantized_at = versions

    def mark_all_changed(self) -> None:
        """Make `requantize_weights` quantize all trained weights: a fused optimizer updates no version numbers."""
        self._quantized_at = []

    @property
    def nbytes(self) -> int:
        """Bytes for elements, transposed elements and scales."""
        return sum(tensor.nbytes for kept in self._kept for tensor in kept.rows)


def _allocate_float8_weights_by_operation(module: nn.Module, precision: Precision) -> Iterator[CachedFloat8Weights]:
    """Yield memory for layers in float8; one operation multiplies an input by several linear layers' weights."""
    joint = [
        group for part in module.modules() if isinstance(part, JointLayers) for group in part.list_fused_float8_layers()
    ]
    yield from (CachedFloat8Weights([layer.weight for layer in group]) for group in joint)
    members = {id(layer) for group in joint for layer in group}
    for layer in find_float8_layers(module, precision).values():
        if id(layer) not in members:
            kind = CachedFloat8Weights if isinstance(layer, LinearLayer) else CachedFloat8Experts
            weights = layer.float8_weights()
            yield from (kind([weight]) for leaf, weight in weights.items() if leaf not in layer.weight_formats)


def describe_width_fault(shape: tuple[int, ...]) -> str:
    """Return why a weight (..., outputs, inputs) can't be multiplied in float8, as the end of a sentence, or ""."""
    if all(width % ALIGNMENT == 0 for width in shape[-2:]):
        return ""
    return f"is {' x '.join(map(str, shape))} on each rank, and float8 needs widths that are divisible by {ALIGNMENT}"


def format_float8_remedy(name: str) -> str:
    """Return the remedy for a layer unable to use float8: a pattern to keep it in the compute dtype."""
    pattern = f"*.{name.rpartition('.')[2]}"
    return f'write linear_in_compute = ["{pattern}"], or linear = "compute"'


def check_gpu_supports_float8(device: torch.device) -> None:
    """Raise UserError for a GPU without products in float8."""
    if lacks_float8(device):
        capability = torch.cuda.get_device_capability(device)
        has, needs = (f"{major}.{minor}" for major, minor in (capability, MIN_CAPABILITY))
        raise UserError(
            f"precision.linear: {torch.cuda.get_device_name(device)} has compute capability {has}, and products in "
            f'float8 need {needs}; write linear = "compute"',
            exit_code=2,
        )


def check_float8(nodes: StageNodes) -> Iterator[Problem]:
    """Yield problems of recipes whose linear layers can't multiply in float8."""
    if nodes.precision is None or nodes.precision.settings.get("linear") != "float8":
        return
    if compiled := nodes.find_feature("stages.compiled"):
        text = f"torch.compile does not trace products in float8, which [{nodes.precision.name}] asks for"
        yield compiled.problem("use", text, f'remove [{compiled.name}], or write linear = "compute"')
    if nodes.precision.settings["linear_weights"] == "step" and nodes.sizes.data_shard * nodes.sizes.context > 1:
        text = "shards are gathered for every use, so that nothing can keep their weights in float8"
        yield nodes.precision.problem("linear_weights", text, 'write linear_weights = "pass"')
    layers, excluded = _find_used_and_unused_float8_layers(nodes)
    names = [*layers, *excluded]
    for number, pattern in enumerate(nodes.precision.settings["linear_in_compute"]):
        if names and not any(fnmatchcase(name, pattern) for name in names):
            text = f"no linear layer or layer of experts is called {pattern!r}; one is {names[0]!r}"
            yield nodes.precision.problem(("linear_in_compute", number), text, "write another pattern, or remove it")
    for name, layer in layers.items():
        for shape in _get_local_weight_shapes(layer, nodes.sizes.tensor):
            if fault := describe_width_fault(shape):
                yield nodes.precision.problem("linear", f"a weight of {name} {fault}", format_float8_remedy(name))
                return


def describe_float8(nodes: StageNodes) -> Iterator[str]:
    """Yield how many linear layers and experts of the model multiply in float8."""
    layers, excluded = _find_used_and_unused_float8_layers(nodes)
    if layers:
        yield f"float8: {format_layer_count(layers, layers | excluded)}; MFU is still relative to the peak of bfloat16"


def format_layer_count(used: Mapping[str, Float8Layer], supported: Mapping[str, Float8Layer]) -> str:
    """Return a sentence such as `14 of 16 linear layers and 4 of 4 layers of experts multiply in float8`."""
    counts = []
    for is_linear, kind in ((True, "linear layers"), (False, "layers of experts")):
        number, total = (
            sum(isinstance(layer, LinearLayer) == is_linear for layer in layers.values())
            for layers in (used, supported)
        )
        if total:
            counts.append(f"{number} of {total} {kind}")
    return f"{' and '.join(counts)} multiply in float8"


def _find_used_and_unused_float8_layers(nodes: StageNodes) -> tuple[dict[str, Float8Layer], dict[str, Float8Layer]]:
    """Return the layers of the recipe's whole model that use float8, and the others that could."""
    built = None if nodes.precision is None else build_precision(nodes.precision)
    module = None if nodes.model is None else build_meta_module_if_known(nodes.model)
    if built is None or module is None:
        return {}, {}
    layers = find_float8_layers(module, built)
    return layers, {name: layer for name, layer in find_float8_candidates(module).items() if name not in layers}


def build_precision(node: NodeView) -> Precision | None:
    """Build a precision from its node's settings; None if they have problems."""
    with suppress(ValueError):
        built: Precision = node.component(**node.settings)
        return built
    return None


def _get_local_weight_shapes(layer: Float8Layer, ranks: int) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of a layer's weights on a rank along `tensor`."""
    for name, weight in layer.float8_weights().items():
        shape = list(weight.shape)
        if ranks > 1 and isinstance(layer, TensorParallel) and (dim := layer.split_dims().get(name)):
            shape[dim.dim] = -(-shape[dim.dim] // ranks)
        yield tuple(shape)
