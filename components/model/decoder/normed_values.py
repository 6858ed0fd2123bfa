"""Attention with normed values, which may be the keys, and whose keys and values later layers may use (Gemma 4)."""

import torch
from torch import Tensor

from drawloom.components.model.decoder.attention import Attention
from drawloom.components.model.decoder.config import DecoderConfig
from drawloom.components.model.decoder.mixer_specs import NormedValueSpec, SharedKeysSpec
from drawloom.components.model.decoder.specs import LayerContext
from drawloom.components.model.layers import Linear, RMSNorm
from drawloom.components.parallel.tensor_ranks import TensorParallel
from drawloom.ports import Kernels


class NormedValueAttention(Attention):
    """Attention whose values are normed by head, without a weight."""

    spec: NormedValueSpec

    def norm_and_rotate(self, q: Tensor, k: Tensor, v: Tensor, context: LayerContext) -> tuple[Tensor, Tensor, Tensor]:
        ones = v.new_ones(self.spec.head_dim, dtype=torch.promote_types(v.dtype, torch.float32))
        q, k, v = super().norm_and_rotate(q, k, self.kernels.rms_norm(v, ones, self.q_norm.eps), context)
        if self.spec.link:
            context.links.setdefault(self.spec.link, (k, v))  # recomputation leaves the first ones, which have a graph
        return q, k, v


class SharedKeysAttention(TensorParallel):
    """Attention whose keys and values are an earlier layer's. A cache keeps them again."""

    def __init__(self, architecture: DecoderConfig, spec: SharedKeysSpec, kernels: Kernels) -> None:
        super().__init__()
        outer, unit, has_bias = architecture.hidden_size, spec.head_dim, architecture.has_bias
        inner = spec.heads * unit
        self.q_proj = Linear(outer, inner, kernels, has_bias("q_proj"), unit=unit)
        self.q_norm = RMSNorm(unit, architecture.rms_norm_eps, kernels)
        self.o_proj = Linear(inner, outer, kernels, has_bias("o_proj"), "rowwise", unit, is_residual=True)
        self.spec = spec
        self.kernels = kernels

    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor:
        """Map hidden states (rows, length, hidden_size), or (tokens, hidden_size) if ranks split them."""
        shape = context.documents.shape
        q = self.q_norm(self.q_proj(self.ranks.gather_tokens(hidden, shape)).view(*shape, -1, self.spec.head_dim))
        if context.angles is not None:
            cos, sin = context.angles
            q = self.kernels.rope(q, cos, sin)
        k, v = context.links[self.spec.link]
        mixed = self.kernels.attention(q, k, v, context.mask, self.spec.options)
        return self.ranks.reduce_scatter_tokens(self.o_proj(mixed.flatten(-2)))
