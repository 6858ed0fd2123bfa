"""Gaussian noise on weights (Graves 2011, "Practical Variational Inference for Neural Networks", section 6)."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drawloom import at_least, component, setting
from drawloom.ports import LinearLayer, StageFeature, WrappingOrder


@component
class WeightNoise(StageFeature):
    """Gaussian noise on the weights of the layers' linear layers, drawn for every pass with gradients."""

    order: ClassVar[WrappingOrder] = WrappingOrder.PRODUCTS
    keeps_layer_shapes: ClassVar[bool] = True

    std: float = setting("standard deviation of the noise", default=0.01, check=at_least(0))

    def finish(self, modules: Sequence[nn.Module], blocks: Sequence[nn.Module]) -> None:
        for block in blocks:
            for layer in block.modules():
                if isinstance(layer, LinearLayer):
                    layer.register_forward_hook(self._add_product_with_noise)

    def _add_product_with_noise(self, layer: Any, inputs: Any, output: Tensor) -> Tensor:
        """Add inputs @ noise.T to a layer's output (..., outputs), for noise like its weight (outputs, inputs)."""
        if not torch.is_grad_enabled():
            return output
        noise = torch.randn_like(layer.weight) * self.std
        return output + F.linear(inputs[0].to(noise.dtype), noise)
