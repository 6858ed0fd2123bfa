"""
Token mixers of a decoder layer.

Causal self-attention; multi-head latent attention, whose keys and values are projected from a narrow latent
(DeepSeek-V2, arXiv 2405.04434); and the gated delta net, attention replaced by a state that each token corrects
(Yang et al. 2024, arXiv 2412.06464).
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drawloom.components.model.decoder.config import DecoderConfig
from drawloom.components.model.decoder.specs import AttentionSpec, DeltaSpec, LatentSpec, LayerContext
from drawloom.components.model.layers import Linear, ProjectionNorm, RMSNorm
from drawloom.components.parallel.parameter_split import SplitDim
from drawloom.components.parallel.tensor import TensorParallel
from drawloom.components.ports.model import Kernels
from drawloom.components.ports.parameter_roles import Role
from drawloom.components.ports.recurrence import RecurrentKernels


class Attention(TensorParallel):
    """
    Causal self-attention inside each document, with the module names of Hugging Face's attention layers.

    Tensor-parallel ranks partition the heads.
    """

    def __init__(self, architecture: DecoderConfig, spec: AttentionSpec, kernels: Kernels) -> None:
        super().__init__()
        outer, unit, has_bias = architecture.hidden_size, spec.head_dim, architecture.has_bias
        query_width, key_width = spec.heads * unit, spec.kv_heads * unit
        # With a gate, the rows of each head are followed by the rows of its gate.
        repeat = 2 if spec.gate else 1
        self.q_proj = Linear(outer, repeat * query_width, kernels, has_bias("q_proj"), unit=repeat * unit)
        self.k_proj = Linear(outer, key_width, kernels, has_bias("k_proj"), unit=unit)
        self.v_proj = Linear(outer, key_width, kernels, has_bias("v_proj"), unit=unit)
        eps, zero_centered = architecture.rms_norm_eps, architecture.zero_centered
        if spec.qk_norm == "head":
            self.q_norm = RMSNorm(unit, eps, kernels, zero_centered)
            self.k_norm = RMSNorm(unit, eps, kernels, zero_centered)
        elif spec.qk_norm == "projection":
            self.q_norm = ProjectionNorm(query_width, eps, kernels, unit)
            self.k_norm = ProjectionNorm(key_width, eps, kernels, unit)
        self.o_proj = Linear(query_width, outer, kernels, has_bias("o_proj"), "rowwise", unit, is_residual=True)
        if spec.sinks:
            self.sinks = nn.Parameter(torch.zeros(spec.heads))
        self.spec = spec
        self.kernels = kernels

    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor:
        """Map hidden states (rows, length, hidden_size), of the parameters' dtype; split tokens with `ranks`."""
        shape = context.documents.shape
        hidden = self.ranks.gather_tokens(hidden, shape)
        q, k, v = self.project_qkv(hidden)
        if self.spec.gate:
            q, gate = (x.flatten(-2) for x in q.view(*shape, -1, 2 * self.spec.head_dim).chunk(2, -1))
        if self.spec.qk_norm == "projection":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (x.view(*shape, -1, self.spec.head_dim) for x in (q, k, v))
        q, k = self._norm_and_rotate(q, k, context)
        mixed = self.kernels.attention(
            q, k, v, context.mask, self.spec.options, self.sinks if self.spec.sinks else None
        )
        mixed = mixed.flatten(-2)
        if self.spec.gate:
            mixed = mixed * gate.sigmoid()
        return self.ranks.reduce_scatter_tokens(self.o_proj(mixed))

    def split_dims(self) -> Mapping[str, SplitDim]:
        return {"sinks": SplitDim(0)} if self.spec.sinks else {}

    def parameter_roles(self) -> Mapping[str, Role]:
        return {"sinks": Role(False, "normal")}

    def project_qkv(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values (..., channels) for hidden states (..., hidden_size)."""
        return self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden)

    def _norm_and_rotate(self, q: Tensor, k: Tensor, context: LayerContext) -> tuple[Tensor, Tensor]:
        """Norm by head and rotate queries and keys (rows, length, heads, head_dim), both only if specified."""
        rope, by_head = self.spec.rope, self.spec.qk_norm == "head"
        if rope is None or context.angles is None:
            return (self.q_norm(q), self.k_norm(k)) if by_head else (q, k)
        cos, sin = context.angles
        if not by_head:
            return self.kernels.rope(q, cos, sin, rope.interleaved), self.kernels.rope(k, cos, sin, rope.interleaved)
        # One kernel norms and rotates both, as it reads each vector once.
        return self.kernels.qk_norm_rope(
            q,
            k,
            self.q_norm.weight,
            self.k_norm.weight,
            eps=self.q_norm.eps,
            cos=cos,
            sin=sin,
            zero_centered=self.q_norm.zero_centered,
            interleaved=rope.interleaved,
        )


LATENT_EPS = 1e-6
"""Constant of the norms of latents, whatever rms_norm_eps is, as in transformers."""


class LatentAttention(TensorParallel):
    """
    Multi-head latent attention inside each document, with the module names of DeepSeek-V3 in transformers.

    Keys and values are expanded from the latent for all tokens. The part of the key that is rotated is shared by all
    heads. Tensor-parallel ranks partition the heads, and gather latents instead of hidden states.
    """

    def __init__(self, architecture: DecoderConfig, spec: LatentSpec, kernels: Kernels) -> None:
        super().__init__()
        outer, has_bias, heads = architecture.hidden_size, architecture.has_bias, spec.heads
        unit, kv_unit = spec.nope_dim + spec.rope_dim, spec.nope_dim + spec.v_dim
        if spec.query_rank is None:
            self.q_proj = Linear(outer, heads * unit, kernels, unit=unit)
        else:
            self.q_a_proj = Linear(outer, spec.query_rank, kernels, has_bias("q_a_proj"), "whole")
            self.q_a_layernorm = RMSNorm(spec.query_rank, LATENT_EPS, kernels)
            self.q_b_proj = Linear(spec.query_rank, heads * unit, kernels, unit=unit)
        latent = spec.kv_rank + spec.rope_dim
        self.kv_a_proj_with_mqa = Linear(outer, latent, kernels, has_bias("kv_a_proj_with_mqa"), "whole")
        self.kv_a_layernorm = RMSNorm(spec.kv_rank, LATENT_EPS, kernels)
        self.kv_b_proj = Linear(spec.kv_rank, heads * kv_unit, kernels, unit=kv_unit)
        self.o_proj = Linear(
            heads * spec.v_dim, outer, kernels, has_bias("o_proj"), "rowwise", spec.v_dim, is_residual=True
        )
        self.spec = spec
        self.kernels = kernels

    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor:
        """Map hidden states (rows, length, hidden_size), of the parameters' dtype; split tokens with `ranks`."""
        shape, spec = context.documents.shape, self.spec
        latent, k_rope = self.kv_a_proj_with_mqa(hidden).split([spec.kv_rank, spec.rope_dim], -1)
        latent = self.kv_a_layernorm(latent)
        if spec.query_rank is None:
            q = self.q_proj(self.ranks.gather_tokens(hidden, shape))
            latent, k_rope = self._gather_split_tokens([latent, k_rope], shape)
        else:
            query_latent = self.q_a_layernorm(self.q_a_proj(hidden))
            query_latent, latent, k_rope = self._gather_split_tokens([query_latent, latent, k_rope], shape)
            q = self.q_b_proj(query_latent)
        q_nope, q_rope = q.view(*shape, -1, spec.nope_dim + spec.rope_dim).split([spec.nope_dim, spec.rope_dim], -1)
        kv = self.kv_b_proj(latent).view(*shape, -1, spec.nope_dim + spec.v_dim)
        k_nope, v = kv.split([spec.nope_dim, spec.v_dim], -1)
        q_rope, k_rope = self._rotate(q_rope, context), self._rotate(k_rope.unsqueeze(-2), context)
        q = torch.cat([q_nope, q_rope], -1)
        k = torch.cat([k_nope, k_rope.expand(*k_nope.shape[:-1], -1)], -1)
        mixed = self.kernels.attention(q, k, v, context.mask, spec.options)
        return self.ranks.reduce_scatter_tokens(self.o_proj(mixed.flatten(-2)))

    def _gather_split_tokens(self, parts: Sequence[Tensor], shape: Sequence[int]) -> Sequence[Tensor]:
        """Gather several tensors' split tokens (tokens, width) in one collective; return (rows, length, width)."""
        if self.ranks.size == 1:
            return parts
        gathered = self.ranks.gather_tokens(torch.cat([*parts], -1), shape)
        return torch.split(gathered, [part.shape[-1] for part in parts], -1)

    def _rotate(self, x: Tensor, context: LayerContext) -> Tensor:
        """Rotate channels (rows, length, heads, rope_dim) by token positions, unless the layer has none."""
        if self.spec.rope is None or context.angles is None:
            return x
        cos, sin = context.angles
        return self.kernels.rope(x, cos, sin, self.spec.rope.interleaved)


KEY_EPS = 1e-6
"""Constant added to the sum of squares by which queries and keys are divided, as in transformers."""


class GatedDeltaNet(TensorParallel):
    """
    Short convolutions over the tokens in a document, then the gated delta rule.

    Queries, keys and values have projections and convolutions of their own, which files join. Tensor-parallel ranks
    partition the key heads, each with its value heads.
    """

    def __init__(self, architecture: DecoderConfig, spec: DeltaSpec, kernels: RecurrentKernels) -> None:
        super().__init__()
        outer, group = architecture.hidden_size, spec.value_heads // spec.key_heads
        units = {"q": spec.key_dim, "k": spec.key_dim, "v": group * spec.value_dim}
        self.units = units
        for name, unit in units.items():
            self.add_module(f"in_proj_{name}", Linear(outer, spec.key_heads * unit, kernels, unit=unit))
            self.register_parameter(f"conv_{name}", nn.Parameter(torch.zeros(spec.key_heads * unit, spec.taps)))
        values, unit = spec.value_heads * spec.value_dim, group * spec.value_dim
        self.in_proj_z = Linear(outer, values, kernels, unit=unit)
        self.in_proj_b = Linear(outer, spec.value_heads, kernels, unit=group)
        self.in_proj_a = Linear(outer, spec.value_heads, kernels, unit=group)
        self.A_log = nn.Parameter(torch.zeros(spec.value_heads))
        self.dt_bias = nn.Parameter(torch.ones(spec.value_heads))
        self.norm = RMSNorm(spec.value_dim, architecture.rms_norm_eps, kernels)
        self.out_proj = Linear(values, outer, kernels, style="rowwise", unit=unit, is_residual=True)
        self.group = group
        self.spec = spec
        self.kernels = kernels

    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor:
        """Map hidden states (rows, length, hidden_size), of the parameters' dtype; split tokens with `ranks`."""
        shape, spec = context.documents.shape, self.spec
        hidden = self.ranks.gather_tokens(hidden, shape)
        q, k, v = (
            self._project_and_convolve(name, hidden, context).view(*shape, -1, width)
            for name, width in spec.head_widths
        )
        wide = torch.promote_types(hidden.dtype, torch.float32)
        beta = self.in_proj_b(hidden).sigmoid()
        g = -self.A_log.to(wide).exp() * F.softplus(self.in_proj_a(hidden).to(wide) + self.dt_bias.to(wide))
        q, k = self._scale_to_l2_norm(q, spec.key_dim**-0.5), self._scale_to_l2_norm(k, 1.0)
        mixed = self.kernels.gated_delta_rule(q, k, v, g, beta, context.recurrence)
        gated = self.kernels.swiglu(self.in_proj_z(hidden).view(mixed.shape), self.norm(mixed))
        return self.ranks.reduce_scatter_tokens(self.out_proj(gated.flatten(-2)))

    def _project_and_convolve(self, name: str, hidden: Tensor, context: LayerContext) -> Tensor:
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
            "A_log": Role(False, lambda uniform: (0.01 + 15.99 * uniform).log()),
            "dt_bias": Role(False, 1.0),
        }
