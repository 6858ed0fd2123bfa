"""Norms of gradients and weights, layer by layer."""

import re
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from drawloom.components.ports.distributed import Mesh
from drawloom.components.ports.run import Accumulator, Step, Value
from drawloom.components.ports.stages import SpreadParameters
from drawloom.graph import component

LAYER = re.compile(r"^(?:.*\.)?layers\.(\d+)\.")


@component(reads=("gradients",), impact="safe")
class LayerNorms:
    """
    `grad_norm/<layer>` and `weight_norm/<layer>`: 2-norms over the parameters of each layer, on all stages.

    A phase, to stand behind clipping and before the optimizer, and a metric. Layers are numbered as in the whole model;
    other parameters are called by the module that holds them: `embed_tokens`, `norm`, `lm_head`.
    """

    parameters: SpreadParameters
    mesh: Mesh

    _layers: list[str] = attrs.field(init=False, factory=list)
    _squares: dict[str, Tensor] = attrs.field(init=False, factory=dict)

    def open(self) -> None:
        """Learn the layers of all stages."""
        mine = [layer_of(name) for name, _ in self.parameters.named()]
        names = {name for each in self.mesh.pipeline_group.gather_json(mine) for name in each}
        numbers, words = ([name for name in names if name.isdecimal() is is_number] for is_number in (True, False))
        self._layers = [*sorted(numbers, key=int), *sorted(words)]

    def run_phase(self, step: Step) -> None:
        """Square the gradients and weights while there are gradients."""
        held = self.parameters.counted()
        self._squares = {
            "grad_norm": self._by_layer(held, lambda parameter: parameter.grad),
            "weight_norm": self._by_layer(held, lambda parameter: parameter),
        }

    @property
    def accumulators(self) -> Mapping[str, Accumulator]:
        """Sums of squares by layer; replicas hold the same."""
        each = Accumulator(shape=(len(self._layers),), of="model")
        return {"grad_norm": each, "weight_norm": each}

    def update(self, step: Step) -> Mapping[str, Tensor]:
        """
        Sums of squares of the parameters that this rank counts for the whole model, float64 (layers,).

        Nothing if the phase did not run.
        """
        squares, self._squares = self._squares, {}
        return squares

    def compute(self, totals: Mapping[str, Tensor], step: Step) -> Mapping[str, Value]:
        """None where a norm is not finite; the sums of squares are float64 (layers,)."""
        return {
            f"{kind}/{layer}": value if torch.isfinite(torch.tensor(value)) else None
            for kind in ("grad_norm", "weight_norm")
            for layer, value in zip(self._layers, totals[kind].sqrt().tolist(), strict=True)
        }

    def _by_layer(self, held: list[tuple[str, nn.Parameter]], tensor_of: Any) -> Tensor:
        """float64 (layers,)."""
        found = [(layer_of(name), tensor_of(parameter)) for name, parameter in held]
        present = [(self._layers.index(layer), tensor) for layer, tensor in found if tensor is not None]
        if not present:
            return torch.zeros(len(self._layers), dtype=torch.float64)
        norms = torch.stack([*torch._foreach_norm([tensor.detach() for _, tensor in present], 2, dtype=torch.float64)])
        places = torch.tensor([place for place, _ in present], device=norms.device)
        zeros = torch.zeros(len(self._layers), dtype=torch.float64, device=norms.device)
        return zeros.index_add_(0, places, norms.square())


def layer_of(name: str) -> str:
    """The number of a parameter's layer, or the module that holds it: `model.norm.weight` is of `norm`."""
    if found := LAYER.match(name):
        return found[1]
    parts = name.split(".")
    return parts[-2] if len(parts) > 1 else name
