"""Small models with adapters and random weights, as stages."""

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import nn

from drawloom.components.adapters.lora import Lora
from drawloom.components.distributed.rng import derive_seed, fill_normal
from drawloom.components.model.decoder.builder import DecoderBuilder
from drawloom.components.ports.model import LayerRange
from drawloom.components.ports.stages import Adapter, Fill, Stage
from drawloom.components.weights.adapted import freeze_adapt_and_list_targets, materialize_and_initialize_adapters
from support.doubles import PlainStages
from support.qwen3 import whole


@attrs.frozen
class OneStage(PlainStages):
    """The whole model as one stage."""

    module: nn.Module
    adapters: Sequence[Adapter] = ()

    @property
    def local(self) -> list[Stage]:
        return [Stage(0, 1, LayerRange(0, 2, True, True), self.module, adapters=self.adapters)]


def lora(*targets: str, **changes: Any) -> Lora:
    """Return LoRA of rank 4 and scale 2."""
    settings: dict[str, Any] = {"targets": list(targets), "rank": 4, "alpha": 8.0}
    return Lora(**(settings | changes))


def fill_from_seed(seed: int) -> Fill:
    """Return a fill that draws an adapter's initial values from a seed."""
    return lambda name, parameter, std: fill_normal(parameter.data, derive_seed(seed, name), std)


def adapt(model: DecoderBuilder, *adapters: Adapter) -> nn.Module:
    """Return a whole model with random weights, the same for all adapters; adapter weights are random, too."""
    torch.manual_seed(0)
    module = whole(model)
    before: dict[str, Any] = dict(module.named_parameters())
    freeze_adapt_and_list_targets(adapters, module)
    materialize_and_initialize_adapters(module, torch.device("cpu"), fill_from_seed(0))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if adapters and parameter.requires_grad:
                noise = torch.randn_like(parameter) * 0.1
                parameter.copy_(noise + (1 if parameter.ndim == 1 else 0) if name in before else parameter + noise)
    return module
