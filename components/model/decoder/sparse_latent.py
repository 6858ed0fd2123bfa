"""Latent attention to tokens chosen by an indexer (DSA: DeepSeek-V3.2, arXiv 2512.02556, section 2)."""

from typing import Any

import torch
from torch import Tensor, nn

from drawloom.components.model.decoder.config import DecoderConfig
from drawloom.components.model.decoder.latent import LATENT_EPS, LatentAttention
from drawloom.components.model.decoder.mixer_specs import SharedIndexSpec, SparseLatentSpec
from drawloom.components.model.decoder.router import attach_loss_gradient
from drawloom.components.model.decoder.specs import LayerContext
from drawloom.components.model.layers import Linear
from drawloom.ports import Kernels


class Indexer(nn.Module):
    """Projections of the indexer, on every tensor-parallel rank; no gradient reaches its inputs."""

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
