"""Multi-head latent attention: keys and values are projected from a narrow latent (DeepSeek-V2, arXiv 2405.04434)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from drawloom.components.model.decoder.config import DecoderConfig
from drawloom.components.model.decoder.mixer_specs import LatentSpec
from drawloom.components.model.decoder.specs import LayerContext
from drawloom.components.model.layers import Linear, RMSNorm
from drawloom.components.parallel.tensor_ranks import TensorParallel
from drawloom.ports import Kernels

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
        """Map hidden states (rows, length, hidden_size), or (tokens, hidden_size) if ranks split them."""
        shape, spec = context.documents.shape, self.spec
        latent, k_rope = self.kv_a_proj_with_mqa(hidden).split([spec.kv_rank, spec.rope_dim], -1)
        latent, own = self.kv_a_layernorm(latent), None
        if spec.query_rank is None:
            q = self.q_proj(self.ranks.gather_tokens(hidden, shape))
            latent, k_rope = self._gather_split_tokens([latent, k_rope], shape)
        else:
            own = self.q_a_layernorm(self.q_a_proj(hidden))
            query_latent, latent, k_rope = self._gather_split_tokens([own, latent, k_rope], shape)
            q = self.q_b_proj(query_latent)
        q_nope, q_rope = q.view(*shape, -1, spec.nope_dim + spec.rope_dim).split([spec.nope_dim, spec.rope_dim], -1)
        kv = self.kv_b_proj(latent).view(*shape, -1, spec.nope_dim + spec.v_dim)
        k_nope, v = kv.split([spec.nope_dim, spec.v_dim], -1)
        interleaved = spec.rope is not None and spec.rope.interleaved
        q_rope, k_rope = (context.rotate(self.kernels, x, interleaved) for x in (q_rope, k_rope.unsqueeze(-2)))
        q = torch.cat([q_nope, q_rope], -1)
        k = torch.cat([k_nope, k_rope.expand(*k_nope.shape[:-1], -1)], -1)
        mixed = self.attend(q, k, v, hidden, own, context)
        return self.ranks.reduce_scatter_tokens(self.o_proj(mixed.flatten(-2)))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, query_latent: Any, context: LayerContext
    ) -> Tensor:
        """
        Return attention's results (rows, length, heads, v_dim) for q, k and v (rows, length, heads, ...).

        `hidden` and `query_latent` (..., width) are of this rank's split tokens; the latter is None without a
        `query_rank`.
        """
        return self.kernels.attention(q, k, v, context.mask, self.spec.options)

    def _gather_split_tokens(self, parts: Sequence[Tensor], shape: Sequence[int]) -> Sequence[Tensor]:
        """Gather several tensors' split tokens (tokens, width) in one collective; return (rows, length, width)."""
        if self.ranks.size == 1:
            return parts
        gathered = self.ranks.gather_tokens(torch.cat([*parts], -1), shape)
        return torch.split(gathered, [part.shape[-1] for part in parts], -1)
