"""Mamba-2's mixer: a decaying state per head (Dao and Gu 2024, arXiv 2405.21060)."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drawloom.components.model.decoder.config import DecoderConfig
from drawloom.components.model.decoder.gated_delta_net import GatedDeltaNet
from drawloom.components.model.decoder.mixer_specs import StateSpaceSpec
from drawloom.components.model.decoder.specs import LayerContext
from drawloom.components.model.layers import Linear, ProjectionNorm
from drawloom.components.parallel.parameter_split import SplitDim
from drawloom.ports import BIAS_ROLE, SCALE_ROLE, Kernels, Role


class GroupNorm(ProjectionNorm):
    """RMSNorm over every `unit` channels; tensor-parallel ranks never split them."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (..., width), or this rank's channels of it, in its dtype."""
        ones = x.new_ones(self.unit, dtype=torch.promote_types(x.dtype, torch.float32))
        normed = self.kernels.rms_norm(x.view(*x.shape[:-1], -1, self.unit), ones, self.eps)
        return normed.view(x.shape) * self.weight.to(x.dtype)


class StateSpaceMixer(GatedDeltaNet):
    """
    Short convolutions over the tokens in a document, then a decaying sum of keys times values.

    Papers call queries, keys and values C, B and x. A token's time step multiplies its value, and the state's decay.
    """

    spec: StateSpaceSpec
    least_rate = 1.0

    def __init__(self, architecture: DecoderConfig, spec: StateSpaceSpec, kernels: Kernels) -> None:
        super().__init__(architecture, spec, kernels)
        self.D = nn.Parameter(torch.ones(spec.value_heads))
        for name, unit in self.units.items() if spec.conv_bias else ():
            self.register_parameter(f"conv_{name}_bias", nn.Parameter(torch.zeros(spec.key_heads * unit)))

    def add_gate_projections(self, outer: int) -> None:
        spec = self.spec
        self.in_proj_z = Linear(outer, spec.value_heads * spec.value_dim, self.kernels, unit=self.units["v"])
        self.in_proj_a = Linear(outer, spec.value_heads, self.kernels, unit=self.group)
        self.dt_bias = nn.Parameter(torch.ones(spec.value_heads))

    def create_norm(self, eps: float) -> GroupNorm:
        return GroupNorm(self.spec.value_heads * self.spec.value_dim, eps, self.kernels, self.units["v"])

    def mix(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, own: Tensor, context: LayerContext) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        steps = F.softplus(self.in_proj_a(hidden).to(wide) + self.dt_bias.to(wide))
        steps = steps.clamp(min=self.spec.min_time_step)
        rates = self.A_log.to(wide).exp()
        mixed = self.kernels.state_space(q, k, v * steps[..., None], -rates * steps, context.recurrence)
        mixed = mixed + self.D.to(wide)[:, None] * v
        return self.norm(self.kernels.swiglu(self.in_proj_z(hidden), mixed.flatten(-2).to(hidden.dtype)))  # type: ignore[no-any-return]

    def project_and_convolve(self, name: str, hidden: Tensor, context: LayerContext) -> Tensor:
        projected, taps = self.get_submodule(f"in_proj_{name}")(hidden), self.get_parameter(f"conv_{name}")
        mixed = self.kernels.causal_conv(projected, taps, context.recurrence, silu=False)
        return F.silu(mixed + self.get_parameter(f"conv_{name}_bias") if self.spec.conv_bias else mixed)

    def split_dims(self) -> Mapping[str, SplitDim]:
        biases = {f"conv_{name}_bias": SplitDim(0, unit) for name, unit in self.units.items()}
        return {**super().split_dims(), "D": SplitDim(0, self.group), **(biases if self.spec.conv_bias else {})}

    def parameter_roles(self) -> Mapping[str, Role]:
        biases = {f"conv_{name}_bias": BIAS_ROLE for name in self.units}
        return {**super().parameter_roles(), **biases, "D": SCALE_ROLE}
