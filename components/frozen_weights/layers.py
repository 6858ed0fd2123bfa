"""Layers with frozen weights in another format or memory, put in the place of a module's layers."""

from typing import Any

from torch import Tensor, nn

from drawloom.components.model.decoder.experts import Experts, Router
from drawloom.components.model.layers import Linear
from drawloom.components.parallel.data_shard import find_untied_heads
from drawloom.kernels.weight_formats.eager import ComputeFormat
from drawloom.ports import StorageFormat, StoredLayer, put_class_before


class StoredLinear(StoredLayer, Linear):
    """Linear layer with a weight decoded for every product."""

    def multiply_by_weight(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.kernels.linear_quantized(x.to(self.weight.dtype), self.weight, self.formats["weight"], bias)

    def decode_weight(self, stored: Tensor) -> Tensor:
        return self.kernels.dequantize(stored, self.formats["weight"])


class StoredExperts(StoredLayer, Experts):
    """Experts with the weights in `formats` decoded for every product."""

    def multiply_by_weight(self, name: str, rows: Tensor, ends: Tensor) -> Tensor:
        if name not in self.formats:
            return super().multiply_by_weight(name, rows, ends)
        return self.kernels.multiply_quantized_experts(rows, getattr(self, name), self.formats[name], ends)


def find_storable_weights(module: nn.Module) -> dict[str, tuple[Linear | Experts, str]]:
    """Return layers and parameter names by weight name, without heads and routers."""
    heads = find_untied_heads(module)
    return {
        f"{path}.{leaf}": (layer, leaf)
        for path, layer in module.named_modules()
        if isinstance(layer, Linear | Experts) and not isinstance(layer, Router) and layer not in heads
        for leaf in (layer.matrices if isinstance(layer, Experts) else ("weight",))
    }


def get_format(layer: Linear | Experts, leaf: str) -> StorageFormat:
    """Return a parameter's format."""
    return layer.formats.get(leaf, ComputeFormat()) if isinstance(layer, StoredLayer) else ComputeFormat()


def set_format(layer: Linear | Experts, leaf: str, storage_format: StorageFormat) -> None:
    """Let a layer decode a parameter with a format."""
    if isinstance(layer, StoredLayer):
        layer.formats = {**layer.formats, leaf: storage_format}
    else:
        stored: Any = layer
        put_class_before(stored, StoredExperts if isinstance(layer, Experts) else StoredLinear)
        stored.formats = {leaf: storage_format}
