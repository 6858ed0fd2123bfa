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
from drawloom.components.model.layers import Linear, ProjectionNorm, RMSNorm, at_least_float32
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

    has_strengths: ClassVar[bool] = True
    """Whether values are written with strengths projected from hidden states."""

    def __init__(self, architecture: DecoderConfig, spec: DeltaSpec, kernels: Kernels) -> None:
        super().__init__()
        outer, group = architecture.hidden_size, spec.linear_num_value_heads // spec.linear_num_key_heads
        units = {"q": spec.linear_key_head_dim, "k": spec.linear_key_head_dim, "v": group * spec.linear_value_head_dim}
        self.units = units
        for name, unit in units.items():
            channels = spec.linear_num_key_heads * unit
            self.add_module(f"in_proj_{name}", Linear(outer, channels, kernels, unit=unit))
            self.register_parameter(f"conv_{name}", nn.Parameter(torch.zeros(channels, spec.taps)))
        self.group = group
        self.spec = spec
        self.kernels = kernels
        self.A_log = nn.Parameter(torch.zeros(spec.linear_num_value_heads))
        self.add_gate_projections(outer)
        self.norm = self.create_norm(spec.norm_eps or architecture.rms_norm_eps)
        self.out_proj = Linear(spec.value_channels, outer, kernels, style="rowwise", unit=units["v"], is_residual=True)

    def add_gate_projections(self, outer: int) -> None:
        """Add the projections of hidden states (..., outer) to decays, write strengths and output gates."""
        heads = self.spec.linear_num_value_heads
        self.in_proj_z = Linear(outer, self.spec.value_channels, self.kernels, unit=self.units["v"])
        if self.has_strengths:
            self.in_proj_b = Linear(outer, heads, self.kernels, unit=self.group)
        self.in_proj_a = Linear(outer, heads, self.kernels, unit=self.group)
        self.dt_bias = nn.Parameter(torch.ones(heads))

    def create_norm(self, eps: float) -> RMSNorm:
        """Return the results' norm."""
        return RMSNorm(self.spec.linear_value_head_dim, eps, self.kernels)

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
        q, k = self._scale_to_l2_norm(q, self.spec.linear_key_head_dim**-0.5), self._scale_to_l2_norm(k, 1.0)
        mixed = self.kernels.gated_delta_rule(q, k, v, g, beta, context.recurrence)
        return self.gate_outputs(self.norm(mixed), hidden, own).flatten(-2)

    def compute_log_decays(self, hidden: Tensor, own: Tensor) -> Tensor:
        """Return log decays (rows, length, value_heads), at least float32; see `mix`."""
        steps = self.compute_time_steps(self.in_proj_a(hidden))
        return -self.A_log.to(steps.dtype).exp() * steps

    def compute_time_steps(self, projected: Tensor) -> Tensor:
        """Return time steps (..., width), at least float32, for projected hidden states (..., width)."""
        wide = at_least_float32(projected)
        return F.softplus(projected.to(wide) + self.dt_bias.to(wide))

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
        weight = x.new_full((width,), length * width**-0.5, dtype=at_least_float32(x))
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
        spec, heads = self.spec, self.spec.linear_num_value_heads
        for name, width in (("f", spec.linear_key_head_dim), ("g", spec.linear_value_head_dim)):
            self.add_module(f"{name}_a_proj", Linear(outer, spec.rank, self.kernels, style="whole"))
            self.add_module(f"{name}_b_proj", Linear(spec.rank, heads * width, self.kernels, unit=self.group * width))
        self.in_proj_b = Linear(outer, heads, self.kernels, unit=self.group)
        self.dt_bias = nn.Parameter(torch.ones(heads * spec.linear_key_head_dim))

    def compute_log_decays(self, hidden: Tensor, own: Tensor) -> Tensor:
        steps = self.compute_time_steps(self._project_from_few_channels("f", hidden, own))
        return -self.A_log.to(steps.dtype).exp()[:, None] * steps.view(
            *steps.shape[:-1], -1, self.spec.linear_key_head_dim
        )

    def gate_outputs(self, normed: Tensor, hidden: Tensor, own: Tensor) -> Tensor:
        return normed * self._project_from_few_channels("g", hidden, own).view(normed.shape).sigmoid()

    def _project_from_few_channels(self, name: str, hidden: Tensor, own: Tensor) -> Tensor:
        """Project this rank's tokens `own` to few channels, and all tokens' channels to (rows, length, width)."""
        few = self.ranks.gather_tokens(self.get_submodule(f"{name}_a_proj")(own), hidden.shape[:2])
        projected: Tensor = self.get_submodule(f"{name}_b_proj")(few)
        return projected

    def split_dims(self) -> Mapping[str, SplitDim]:
        return {**super().split_dims(), "dt_bias": SplitDim(0, self.group * self.spec.linear_key_head_dim)}


class GroupNorm(ProjectionNorm):
    """RMSNorm over every `unit` channels; tensor-parallel ranks never split them."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (..., width), or this rank's channels of it, in its dtype."""
        ones = x.new_ones(self.unit, dtype=at_least_float32(x))
        normed = self.kernels.rms_norm(x.view(*x.shape[:-1], -1, self.unit), ones, self.eps)
        return normed.view(x.shape) * self.weight.to(x.dtype)


class StateSpaceMixer(GatedDeltaNet):
    """
    Short convolutions over the tokens in a document, then a decaying sum of keys times values.

    Papers call queries, keys and values C, B and x. A token's time step multiplies its value, and the state's decay.
    """

    spec: StateSpaceSpec
    least_rate = 1.0
    has_strengths = False

    def __init__(self, architecture: DecoderConfig, spec: StateSpaceSpec, kernels: Kernels) -> None:
        super().__init__(architecture, spec, kernels)
        self.D = nn.Parameter(torch.ones(spec.linear_num_value_heads))
        for name, unit in self.units.items() if spec.conv_bias else ():
            self.register_parameter(f"conv_{name}_bias", nn.Parameter(torch.zeros(spec.linear_num_key_heads * unit)))

    def create_norm(self, eps: float) -> GroupNorm:
        return GroupNorm(self.spec.value_channels, eps, self.kernels, self.units["v"])

    def mix(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, own: Tensor, context: LayerContext) -> Tensor:
        steps = self.compute_time_steps(self.in_proj_a(hidden)).clamp(min=self.spec.min_time_step)
        rates = self.A_log.to(steps.dtype).exp()
        mixed = self.kernels.state_space(q, k, v * steps[..., None], -rates * steps, context.recurrence)
        mixed = mixed + self.D.to(steps.dtype)[:, None] * v
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
