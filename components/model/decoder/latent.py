"""
Multi-head latent attention: keys and values are projected from a narrow latent (DeepSeek-V2, arXiv 2405.04434).

It may see only the tokens chosen by an indexer (DSA: DeepSeek-V3.2, arXiv 2512.02556, section 2).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from drawloom.components.model.decoder.config import DecoderConfig
from drawloom.components.model.decoder.experts import attach_loss_gradient
from drawloom.components.model.decoder.specs import LatentSpec, LayerContext, SharedIndexSpec, SparseLatentSpec
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


class Indexer(nn.Module):
    """The indexer's projections, on every tensor-parallel rank; no gradient reaches its inputs."""

    def __init__(self, architecture: DecoderConfig, spec: SparseLatentSpec, kernels: Kernels) -> None:
        super().__init__()
        outer, heads = architecture.hidden_size, spec.index_heads
        self.wq_b = Linear(spec.query_rank, heads * spec.index_dim, kernels, style="whole")
        self.wk = Linear(outer, spec.index_dim, kernels, style="whole")
        self.k_norm = nn.LayerNorm(spec.index_dim, LATENT_EPS)
        self.weights_proj = Linear(outer, heads, kernels, style="whole")

    def forward(self, hidden: Tensor, query_latent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return flat queries, keys and head weights (..., width) for hidden states and latents (..., width)."""
        hidden, query_latent = hidden.detach(), query_latent.detach()
        return self.wq_b(query_latent), self.k_norm(self.wk(hidden)), self.weights_proj(hidden)


def attend_to_visible_tokens(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """
    Return attention's results (rows, length, heads, width) and weights (rows, heads, length, keys), at least float32.

    q, k and v are (rows, tokens, heads, width), `visible` is bool (rows, length, keys).
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    products = torch.einsum("rqhd,rkhd->rhqk", q, k).to(wide) * scale
    weights = products.masked_fill(~visible[:, None], -torch.inf).softmax(-1)
    return torch.einsum("rhqk,rkhd->rqhd", weights.to(v.dtype), v), weights


class SharedIndexAttention(LatentAttention):
    """Latent attention to an earlier indexer's choice."""

    spec: SharedIndexSpec

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, query_latent: Any, context: LayerContext
    ) -> Tensor:
        k, v, _ = self.kernels.extend_keys(k, v, context.mask)
        scale = self.spec.options.scale or 1.0
        return attend_to_visible_tokens(q, k, v, context.links[self.spec.link], scale)[0]


class SparseLatentAttention(LatentAttention):
    """
    Latent attention to the tokens chosen by an indexer, in plain torch.

    The indexer learns from the divergence of its scores' softmax from the heads' mean attention, over the visible
    tokens: all tokens in warm-up, the chosen ones afterwards.
    """

    spec: SparseLatentSpec

    def __init__(self, architecture: DecoderConfig, spec: SparseLatentSpec, kernels: Kernels) -> None:
        super().__init__(architecture, spec, kernels)
        self.indexer = Indexer(architecture, spec, kernels)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, query_latent: Any, context: LayerContext
    ) -> Tensor:
        spec, shape, wide = self.spec, context.documents.shape, torch.promote_types(q.dtype, torch.float32)
        parts = self.indexer(hidden, query_latent)
        queries, keys, factors = (self.ranks.gather_tokens_without_grad_sum(part, shape) for part in parts)
        queries, keys = (
            context.rotate(self.kernels, x.view(*shape, -1, spec.index_dim), spec.index_interleaved)
            for x in (queries, keys)
        )
        k, v, visible = self.kernels.extend_keys(k, v, context.mask)
        keys, _, _ = self.kernels.extend_keys(keys, keys, context.mask)
        if visible is None:
            documents = context.documents
            visible = (documents[:, :, None] == documents[:, None, :]).tril()
        products = torch.einsum("rqhd,rkd->rqhk", queries.to(wide), keys[:, :, 0].to(wide)).relu()
        scores = torch.einsum("rqhk,rqh->rqk", products, factors.to(wide)) * (spec.index_heads * spec.index_dim) ** -0.5
        scores = scores.masked_fill(~visible, -torch.inf)
        if spec.chosen is not None:
            best = scores.detach().topk(min(spec.chosen, scores.shape[-1])).indices
            visible = visible & torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)
        if spec.link:
            context.links.setdefault(spec.link, visible)
        mixed, weights = attend_to_visible_tokens(q, k, v, visible, spec.options.scale or 1.0)
        if context.weights is None or not spec.loss_coef:
            return mixed
        target = self.ranks.all_reduce(weights.detach().sum(1)) * (spec.loss_coef / spec.heads)
        learned = scores.masked_fill(~visible, -torch.inf).log_softmax(-1).masked_fill(~visible, 0.0)
        return attach_loss_gradient(mixed, -(target * learned * context.weights.to(wide)[..., None]).sum())
