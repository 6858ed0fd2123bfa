"""Gradient and weight norms by layer."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from drawloom import component, internal
from drawloom.ports import Accumulator, Mesh, MetricTotals, MetricValues, Parameters, Step

LAYER = re.compile(r"^(?:(loss)\.|(?:.*\.)?layers\.(\d+)\.)")  # a loss may have layers of its own


@component(reads=("gradients",), impact="safe")
class LayerNorms:
    """
    `grad_norm/<layer>` and `weight_norm/<layer>`: 2-norms over a layer's parameters, on all stages.

    A phase, between clipping and the optimizer, and a metric. Layers are numbered as in the whole model; other
    parameters have their module's name: `embed_tokens`, `norm`, `lm_head`, or `loss`.
    """

    parameters: Parameters
    mesh: Mesh

    _layers: list[str] = internal(factory=list)
    _squares: dict[str, Tensor] = internal(factory=dict)

    def open(self) -> None:
        """Gather all stages' layers."""
        local = [layer_number_or_module_name(name) for name, _ in self.parameters.named_parameters()]
        names = {name for rank_names in self.mesh.pipeline_group.gather_json(local) for name in rank_names}
        self._layers = sorted(
            names, key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name)
        )

    def run_phase(self, step: Step) -> None:
        """Sum squared gradients and weights while there are gradients."""
        owned = self.parameters.owned_parameters()
        self._squares = {
            "grad_norm": self._sum_squares_by_layer(owned, lambda parameter: parameter.grad),
            "weight_norm": self._sum_squares_by_layer(owned, lambda parameter: parameter),
        }

    @property
    def accumulators(self) -> Mapping[str, Accumulator]:
        """Sums of squares by layer, the same on replicas."""
        squares = Accumulator(shape=(len(self._layers),), scope="model")
        return {"grad_norm": squares, "weight_norm": squares}

    def measure_on_rank(self, step: Step) -> MetricTotals:
        """
        Return sums of squares over this rank's own parameters, float64 (layers,).

        Return {} if the phase did not run.
        """
        squares, self._squares = self._squares, {}
        return squares

    def compute(self, totals: MetricTotals, step: Step) -> MetricValues:
        """Return the norms, None if not finite; the sums of squares are float64 (layers,)."""
        return {
            f"{kind}/{layer}": value if torch.isfinite(torch.tensor(value)) else None
            for kind in ("grad_norm", "weight_norm")
            for layer, value in zip(self._layers, totals[kind].sqrt().tolist(), strict=True)
        }

    def _sum_squares_by_layer(self, owned: list[tuple[str, nn.Parameter]], tensor_of: Any) -> Tensor:
        """Sum the parameters' squared elements by layer: float64 (layers,)."""
        present = [
            (self._layers.index(layer_number_or_module_name(name)), tensor)
            for name, parameter in owned
            if (tensor := tensor_of(parameter)) is not None
        ]
        if not present:
            return torch.zeros(len(self._layers), dtype=torch.float64)
        norms = torch.stack([*torch._foreach_norm([tensor.detach() for _, tensor in present], 2, dtype=torch.float64)])
        indices = torch.tensor([index for index, _ in present], device=norms.device)
        zeros = torch.zeros(len(self._layers), dtype=torch.float64, device=norms.device)
        return zeros.index_add_(0, indices, norms.square())


def layer_number_or_module_name(parameter_name: str) -> str:
    """Return the layer number in a parameter's name, or its module's name: `norm` for `model.norm.weight`."""
    if match := LAYER.match(parameter_name):
        return match[1] or match[2]
    parts = parameter_name.split(".")
    return parts[-2] if len(parts) > 1 else parameter_name
