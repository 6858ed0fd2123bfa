"""
A decoder layer: branches of attention, a gated feed-forward network or experts on a residual stream.

Gated feed-forward network: Shazeer 2020, arXiv 2002.05202.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from drawloom.components.model.decoder.config import DecoderConfig
from drawloom.components.model.decoder.specs import AttentionSpec, Branch, LayerContext, MlpSpec
from drawloom.components.model.layers import Linear, ProjectionNorm, RMSNorm
from drawloom.components.parallel.tensor_ranks import SplitDim, TensorParallel
from drawloom.ports import Kernels, NormAndSum, Role


class Attention(TensorParallel):
    """
    Causal self-attention inside each document, with the module names of Hugging Face's attention layers.

    Tensor-parallel ranks partition the heads.
    """

    def __init__(self, architecture: DecoderConfig, spec: AttentionSpec, kernels: Kernels) -> None:
        super().__init__()
        outer, unit, bias = architecture.hidden_size, spec.head_dim, architecture.attention_bias
        query_width, key_width = spec.num_attention_heads * unit, spec.num_key_value_heads * unit
        # With a gate, the rows of each head are followed by the rows of its gate.
        repeat = 2 if spec.attention_gate else 1
        self.q_proj = Linear(outer, repeat * query_width, kernels, bias, unit=repeat * unit)
        self.k_proj = Linear(outer, key_width, kernels, bias, unit=unit)
        if not spec.keys_as_values:
            self.v_proj = Linear(outer, key_width, kernels, bias, unit=unit)
        eps, zero_centered = architecture.rms_norm_eps, architecture.zero_centered
        if spec.qk_norm == "head":
            self.q_norm = RMSNorm(unit, eps, kernels, zero_centered)
            self.k_norm = RMSNorm(unit, eps, kernels, zero_centered)
        elif spec.qk_norm == "projection":
            self.q_norm = ProjectionNorm(query_width, eps, kernels, unit)
            self.k_norm = ProjectionNorm(key_width, eps, kernels, unit)
        self.o_proj = Linear(query_width, outer, kernels, architecture.output_bias, "rowwise", unit, is_residual=True)
        if spec.attention_sinks:
            self.sinks = nn.Parameter(torch.zeros(spec.num_attention_heads))
        self.spec = spec
        self.kernels = kernels

    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor:
        """Map hidden states (rows, length, hidden_size), or (tokens, hidden_size) if ranks split them."""
        shape = context.documents.shape
        q, k, v = self.project_qkv(hidden, shape)
        if self.spec.attention_gate:
            q, gate = (x.flatten(-2) for x in q.view(*shape, -1, 2 * self.spec.head_dim).chunk(2, -1))
        if self.spec.qk_norm == "projection":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (x.view(*shape, -1, self.spec.head_dim) for x in (q, k, v))
        q, k, v = self.norm_and_rotate(q, k, v, context)
        mixed = self.kernels.attention(
            q, k, v, context.mask, self.spec.options, self.sinks if self.spec.attention_sinks else None
        )
        mixed = mixed.flatten(-2)
        if self.spec.attention_gate:
            mixed = mixed * gate.sigmoid()
        return self.project_back(mixed)

    def split_dims(self) -> Mapping[str, SplitDim]:
        return {"sinks": SplitDim(0)} if self.spec.attention_sinks else {}

    def parameter_roles(self) -> Mapping[str, Role]:
        return {"sinks": Role(False, "normal")}

    def project_back(self, mixed: Tensor) -> Tensor:
        """Return this rank's hidden states for mixed values (rows, length, channels)."""
        return self.ranks.reduce_scatter_tokens(self.o_proj(mixed))

    def project_qkv(self, hidden: Tensor, shape: Sequence[int]) -> tuple[Tensor, ...]:
        """Return all tokens' queries, keys and values (*shape, channels), for this rank's hidden states."""
        hidden = self.ranks.gather_tokens(hidden, shape)
        q, k = self.q_proj(hidden), self.k_proj(hidden)
        return q, k, k if self.spec.keys_as_values else self.v_proj(hidden)

    def norm_and_rotate(self, q: Tensor, k: Tensor, v: Tensor, context: LayerContext) -> tuple[Tensor, Tensor, Tensor]:
        """
        Norm by head and rotate queries and keys, both only if specified; all are (rows, length, heads, head_dim).
        """
        rope, by_head = self.spec.rope, self.spec.qk_norm == "head"
        if rope is None or context.angles is None:
            return (self.q_norm(q), self.k_norm(k), v) if by_head else (q, k, v)
        if not by_head:
            q, k = (context.rotate(self.kernels, x, rope.interleaved) for x in (q, k))
            return q, k, v
        cos, sin = context.angles
        # One kernel norms and rotates both, as it reads each vector once.
        q, k = self.kernels.qk_norm_rope(
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
        return q, k, v


class GatedMlp(TensorParallel):
    """
    down_proj(activation(gate_proj(x)) * up_proj(x)), with the module names of Hugging Face's MLP layers.

    Activations without a gate have no gate_proj. Tensor-parallel ranks partition the inner channels.
    """

    gate_proj: Linear
    up_proj: Linear

    def __init__(self, architecture: DecoderConfig, spec: MlpSpec, kernels: Kernels) -> None:
        super().__init__()
        outer, inner, bias = architecture.hidden_size, spec.width, architecture.mlp_bias
        for name in spec.activation.inner_projections:
            self.add_module(name, Linear(outer, inner, kernels, bias))
        self.down_proj = Linear(inner, outer, kernels, bias, "rowwise", is_residual=True)
        self.activation = spec.activation
        self.kernels = kernels

    def forward(self, hidden: Tensor, context: LayerContext | None = None) -> Tensor:
        """Map hidden states (..., hidden_size), of the parameters' dtype."""
        hidden = self.ranks.gather_tokens(hidden)
        products = [getattr(self, name)(hidden) for name in self.activation.inner_projections]
        # Sums over this rank's inner channels.
        return self.ranks.reduce_scatter_tokens(self.down_proj(self.activation.apply(self.kernels, products)))


class Block(nn.Module):
    """
    A transformer layer of several branches: norm, module and norm, added to the residual stream.

    Modules carry the names of Hugging Face's decoder layers.
    """

    def __init__(self, architecture: DecoderConfig, branches: Sequence[Branch], kernels: Kernels) -> None:
        super().__init__()
        self.branches = tuple(branches)
        self.residual_multiplier = architecture.residual_multiplier
        self.kernels = kernels
        for branch in self.branches:
            for name in filter(None, (branch.norm_before, branch.norm_after)):
                norm = RMSNorm(architecture.hidden_size, architecture.rms_norm_eps, kernels, architecture.zero_centered)
                self.add_module(name, norm)
            self.add_module(branch.name, branch.spec.build(architecture, kernels))

    @property
    def cost_key(self) -> Hashable:
        return None if any(branch.spec.is_linked for branch in self.branches) else self.branches

    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor:
        """Map hidden states (rows, length, hidden_size), or (tokens, hidden_size) if ranks split them."""
        output: Tensor | None = None  # the last branch's; the next norm's kernel adds it
        for branch in self.branches:
            inputs, hidden = self.add_and_norm(output, hidden, branch)
            output = self.get_submodule(branch.name)(inputs, context)
            if branch.norm_after is not None:
                output = self.get_submodule(branch.norm_after)(output)
            if self.residual_multiplier != 1.0:
                output = output * self.residual_multiplier
        return hidden if output is None else hidden + output

    def add_and_norm(self, output: Tensor | None, hidden: Tensor, branch: Branch) -> NormAndSum:
        """Add a branch's output to the residual stream; return the next branch's normed input and the stream."""
        if branch.norm_before is None:
            summed = hidden if output is None else hidden + output
            return NormAndSum(summed, summed)
        norm: Any = self.get_submodule(branch.norm_before)
        if output is None:
            return NormAndSum(norm(hidden), hidden)
        # One kernel adds and norms, which saves a pass over memory.
        return self.kernels.add_rms_norm(output, hidden, norm.weight, norm.eps, norm.zero_centered)
