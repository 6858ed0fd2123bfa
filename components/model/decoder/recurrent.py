"""
Parts in place of attention, which take states over the tokens in a document.

Gated delta net: a state that each token corrects (Yang et al. 2024, arXiv 2412.06464). Kimi Delta Attention: with a
decay for every key channel (arXiv 2510.26692). Mamba-2: a decaying state per head (Dao and Gu 2024, arXiv 2405.21060).
Gated short convolution: the last tokens alone (LFM2, Liquid AI 2025, arXiv 2511.23404).
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drawloom.components.model.decoder.branch_specs import ChannelDeltaSpec, DeltaSpec, ShortConvSpec, StateSpaceSpec
from drawloom.components.model.decoder.config import DecoderConfig
from drawloom.components.model.decoder.specs import LayerContext
from drawloom.components.model.layers import Linear, ProjectionNorm, RMSNorm
from drawloom.components.parallel.tensor_ranks import SplitDim, TensorParallel
from drawloom.ports import Kernels, Role

KEY_EPS = 1e-6
"""Constant added to the sum of squares by which queries and keys are divided, as in transformers."""


def draw_time_steps(uniform: Tensor) -> Tensor:
    """Return values whose softplus is log-uniform from 0.001 to 0.1 (Mamba's), for uniform numbers (...) in (0, 1)."""
    steps = 0.001 * 100**uniform
    return steps + (-torch.expm1(-steps)).log()


class GatedDeltaNet(TensorParallel):
    """
    Short convolutions over the tokens in a document, then the gated delta rule.

    Queries, keys and values have projections and convolutions of their own, which files join. Tensor-parallel ranks
    partition the key heads, each with its value heads.
    """

    least_rate: ClassVar[float] = 0.01
    """Least initial decay rate by head; the greatest is 16."""

    def __init__(self, architecture: DecoderConfig, spec: DeltaSpec, kernels: Kernels) -> None:
        super().__init__()
        outer, group = architecture.hidden_size, spec.value_heads // spec.key_heads
        units = {"q": spec.key_dim, "k": spec.key_dim, "v": group * spec.value_dim}
        self.units = units
        for name, unit in units.items():
            self.add_module(f"in_proj_{name}", Linear(outer, spec.key_heads * unit, kernels, unit=unit))
            self.register_parameter(f"conv_{name}", nn.Parameter(torch.zeros(spec.key_heads * unit, spec.taps)))
        values, unit = spec.value_heads * spec.value_dim, group * spec.value_dim
        self.group = group
        self.spec = spec
        self.kernels = kernels
        self.A_log = nn.Parameter(torch.zeros(spec.value_heads))
        self.add_gate_projections(outer)
        self.norm = self.create_norm(spec.norm_eps or architecture.rms_norm_eps)
        self.out_proj = Linear(values, outer, kernels, style="rowwise", unit=unit, is_residual=True)

    def add_gate_projections(self, outer: int) -> None:
        """Add the projections of hidden states (..., outer) to decays, write strengths and output gates."""
        spec = self.spec
        values, unit = spec.value_heads * spec.value_dim, self.group * spec.value_dim
        self.in_proj_z = Linear(outer, values, self.kernels, unit=unit)
        self.in_proj_b = Linear(outer, spec.value_heads, self.kernels, unit=self.group)
        self.in_proj_a = Linear(outer, spec.value_heads, self.kernels, unit=self.group)
        self.dt_bias = nn.Parameter(torch.ones(spec.value_heads))

    def create_norm(self, eps: float) -> RMSNorm:
        """Return the results' norm."""
        return RMSNorm(self.spec.value_dim, eps, self.kernels)

    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor:
        """Map hidden states (rows, length, hidden_size), or (tokens, hidden_size) if ranks split them."""
        shape, spec, own = context.documents.shape, self.spec, hidden
        hidden = self.ranks.gather_tokens(own, shape)
        q, k, v = (
            self.project_and_convolve(name, hidden, context).view(*shape, -1, width) for name, width in spec.head_widths
        )
        mixed = self.mix(q, k, v, hidden, own, context)
        return self.ranks.reduce_scatter_tokens(self.out_proj(mixed))

    def mix(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, own: Tensor, context: LayerContext) -> Tensor:
        """
        Return gated results (rows, length, channels) for convolved q, k and v, (rows, length, heads, ...), and hidden
        states (rows, length, hidden_size).

        `own` are this rank's split tokens.
        """
        beta = self.in_proj_b(hidden).sigmoid()
        if self.spec.max_strength != 1.0:
            beta = beta * self.spec.max_strength
        g = self.compute_log_decays(hidden, own)
        q, k = self._scale_to_l2_norm(q, self.spec.key_dim**-0.5), self._scale_to_l2_norm(k, 1.0)
        mixed = self.kernels.gated_delta_rule(q, k, v, g, beta, context.recurrence)
        return self.gate_outputs(self.norm(mixed), hidden, own).flatten(-2)

    def compute_log_decays(self, hidden: Tensor, own: Tensor) -> Tensor:
        """Return log decays (rows, length, value_heads), at least float32; see `mix`."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        return -self.A_log.to(wide).exp() * F.softplus(self.in_proj_a(hidden).to(wide) + self.dt_bias.to(wide))

    def gate_outputs(self, normed: Tensor, hidden: Tensor, own: Tensor) -> Tensor:
        """Gate normed results (rows, length, value_heads, V) by hidden states; see `mix`."""
        return self.kernels.swiglu(self.in_proj_z(hidden).view(normed.shape), normed)

    def project_and_convolve(self, name: str, hidden: Tensor, context: LayerContext) -> Tensor:
        """Project hidden (rows, length, hidden_size) to queries, keys or values, and convolve them over tokens."""
        projected = self.get_submodule(f"in_proj_{name}")(hidden)
        return self.kernels.causal_conv(projected, self.get_parameter(f"conv_{name}"), context.recurrence)

    def _scale_to_l2_norm(self, x: Tensor, length: float) -> Tensor:
        """Scale vectors (..., width) to an L2 norm; an RMS norm does it in one pass, and rounds once."""
        width = x.shape[-1]
        weight = x.new_full((width,), length * width**-0.5, dtype=torch.promote_types(x.dtype, torch.float32))
        return self.kernels.rms_norm(x, weight, KEY_EPS / width)

    def split_dims(self) -> Mapping[str, SplitDim]:
        convolutions = {f"conv_{name}": SplitDim(0, unit) for name, unit in self.units.items()}
        return convolutions | dict.fromkeys(("A_log", "dt_bias"), SplitDim(0, self.group))

    def parameter_roles(self) -> Mapping[str, Role]:
        convolution = Role(False, "normal", 1.0)
        return {
            **{f"conv_{name}": convolution for name in self.units},
            "A_log": Role(False, lambda uniform: (self.least_rate + (16 - self.least_rate) * uniform).log()),
            "dt_bias": Role(False, draw_time_steps if self.spec.draws_time_steps else 1.0),
        }


class ChannelDeltaNet(GatedDeltaNet):
    """Gated delta net whose decays, by channel, and sigmoid gates are projected from few channels."""

    spec: ChannelDeltaSpec
    least_rate = 1.0

    def add_gate_projections(self, outer: int) -> None:
        spec = self.spec
        keys, values = spec.value_heads * spec.key_dim, spec.value_heads * spec.value_dim
        for name, width, unit in (("f", keys, spec.key_dim), ("g", values, spec.value_dim)):
            self.add_module(f"{name}_a_proj", Linear(outer, spec.rank, self.kernels, style="whole"))
            self.add_module(f"{name}_b_proj", Linear(spec.rank, width, self.kernels, unit=self.group * unit))
        self.in_proj_b = Linear(outer, spec.value_heads, self.kernels, unit=self.group)
        self.dt_bias = nn.Parameter(torch.ones(keys))

    def compute_log_decays(self, hidden: Tensor, own: Tensor) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        steps = F.softplus(self._project_from_few_channels("f", hidden, own).to(wide) + self.dt_bias.to(wide))
        return -self.A_log.to(wide).exp()[:, None] * steps.view(*steps.shape[:-1], -1, self.spec.key_dim)

    def gate_outputs(self, normed: Tensor, hidden: Tensor, own: Tensor) -> Tensor:
        return normed * self._project_from_few_channels("g", hidden, own).view(normed.shape).sigmoid()

    def _project_from_few_channels(self, name: str, hidden: Tensor, own: Tensor) -> Tensor:
        """Project this rank's tokens `own` to few channels, and all tokens' channels to (rows, length, width)."""
        few = self.ranks.gather_tokens(self.get_submodule(f"{name}_a_proj")(own), hidden.shape[:2])
        projected: Tensor = self.get_submodule(f"{name}_b_proj")(few)
        return projected

    def split_dims(self) -> Mapping[str, SplitDim]:
        return {**super().split_dims(), "dt_bias": SplitDim(0, self.group * self.spec.key_dim)}


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


class ShortConvolution(TensorParallel):
    """
    out_proj(c * convolution(b * x)) for projections b, c and x, channel by channel inside each document.

    Tensor-parallel ranks partition the channels. Files join the three projections.
    """

    def __init__(self, architecture: DecoderConfig, spec: ShortConvSpec, kernels: Kernels) -> None:
        super().__init__()
        width = architecture.hidden_size
        for name in "bcx":
            self.add_module(f"in_proj_{name}", Linear(width, width, kernels))
        self.taps = nn.Parameter(torch.zeros(width, spec.taps))
        self.out_proj = Linear(width, width, kernels, style="rowwise", is_residual=True)
        self.kernels = kernels

    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor:
        """Map hidden states (rows, length, hidden_size), or (tokens, hidden_size) if ranks split them."""
        hidden = self.ranks.gather_tokens(hidden, context.documents.shape)
        b, c, x = (self.get_submodule(f"in_proj_{name}")(hidden) for name in "bcx")
        mixed = self.kernels.causal_conv(b * x, self.taps, context.recurrence, silu=False)
        return self.ranks.reduce_scatter_tokens(self.out_proj(c * mixed))

    def split_dims(self) -> Mapping[str, SplitDim]:
        return {"taps": SplitDim(0)}

    def parameter_roles(self) -> Mapping[str, Role]:
        return {"taps": Role(False, "normal", 1.0)}
