"""
Multi-head latent attention: keys and values are projected from a narrow latent (DeepSeek-V2, arXiv 2405.04434).

It may see only the tokens chosen by an indexer (DSA: DeepSeek-V3.2, arXiv 2512.02556, section 2).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from drawloom.components.model.decoder.branch_specs import LatentSpec, SharedIndexSpec, SparseLatentSpec
from drawloom.components.model.decoder.config import DecoderConfig
from drawloom.components.model.decoder.experts import attach_loss_gradient
from drawloom.components.model.decoder.specs import LayerContext
from drawloom.components.model.layers import Linear, RMSNorm, at_least_float32
from drawloom.components.parallel.tensor_ranks import TensorParallel
from drawloom.ports import Kernels

LATENT_EPS = 1e-6
"""Constant of the norms of latents, whatever rms_norm_eps is, as in transformers."""


class LatentInputs(NamedTuple):
    """
    Queries (rows, length, heads, qk_nope_head_dim) and (rows, length, heads, rope_dim), latents (rows, length,
    kv_lora_rank), and the rotated part of keys (rows, length, 1, rope_dim).
    """

    q_nope: Tensor
    q_rope: Tensor
    latents: Tensor
    k_rope: Tensor


class LatentAttention(TensorParallel):
    """
    Multi-head latent attention inside each document, with the module names of DeepSeek-V3 in transformers.

    Keys and values are expanded from the latent for all tokens. The part of the key that is rotated is shared by all
    heads. Tensor-parallel ranks partition the heads, and gather latents instead of hidden states.
    """

    def __init__(self, architecture: DecoderConfig, spec: LatentSpec, kernels: Kernels) -> None:
        super().__init__()
        outer, bias, heads = architecture.hidden_size, architecture.attention_bias, spec.num_attention_heads
        unit, kv_unit = spec.qk_nope_head_dim + spec.rope_dim, spec.qk_nope_head_dim + spec.v_head_dim
        if not spec.q_lora_rank:
            self.q_proj = Linear(outer, heads * unit, kernels, unit=unit)
        else:
            self.q_a_proj = Linear(outer, spec.q_lora_rank, kernels, bias, "whole")
            self.q_a_layernorm = RMSNorm(spec.q_lora_rank, LATENT_EPS, kernels)
            self.q_b_proj = Linear(spec.q_lora_rank, heads * unit, kernels, unit=unit)
        latent = spec.kv_lora_rank + spec.rope_dim
        self.kv_a_proj_with_mqa = Linear(outer, latent, kernels, bias, "whole")
        self.kv_a_layernorm = RMSNorm(spec.kv_lora_rank, LATENT_EPS, kernels)
        self.kv_b_proj = Linear(spec.kv_lora_rank, heads * kv_unit, kernels, unit=kv_unit)
        self.o_proj = Linear(
            heads * spec.v_head_dim,
            outer,
            kernels,
            architecture.output_bias,
            "rowwise",
            spec.v_head_dim,
            is_residual=True,
        )
        self.spec = spec
        self.kernels = kernels

    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor:
        """Map hidden states (rows, length, hidden_size), or (tokens, hidden_size) if ranks split them."""
        shape, spec = context.documents.shape, self.spec
        latent, k_rope = self.kv_a_proj_with_mqa(hidden).split([spec.kv_lora_rank, spec.rope_dim], -1)
        latent, own = self.kv_a_layernorm(latent), None
        if not spec.q_lora_rank:
            q = self.q_proj(self.ranks.gather_tokens(hidden, shape))
            latent, k_rope = self._gather_split_tokens([latent, k_rope], shape)
        else:
            own = self.q_a_layernorm(self.q_a_proj(hidden))
            query_latent, latent, k_rope = self._gather_split_tokens([own, latent, k_rope], shape)
            q = self.q_b_proj(query_latent)
        widths = [spec.qk_nope_head_dim, spec.rope_dim]
        q_nope, q_rope = q.view(*shape, -1, sum(widths)).split(widths, -1)
        interleaved = spec.rope is not None and spec.rope.interleaved
        q_rope, k_rope = (context.rotate(self.kernels, x, interleaved) for x in (q_rope, k_rope.unsqueeze(-2)))
        mixed = self.attend(LatentInputs(q_nope, q_rope, latent, k_rope), hidden, own, context)
        return self.ranks.reduce_scatter_tokens(self.o_proj(mixed.flatten(-2)))

    def attend(
        self, inputs: LatentInputs, hidden: Tensor, query_latent: Tensor | None, context: LayerContext
    ) -> Tensor:
        """
        Return attention's results (rows, length, heads, v_head_dim).

        `hidden` and `query_latent` (..., width) are of this rank's split tokens; the latter is None without a
        `q_lora_rank`.
        """
        q_nope, q_rope, latents, k_rope = inputs
        k_nope, v = self._split_expanded(self.kv_b_proj(latents))
        q = torch.cat([q_nope, q_rope], -1)
        k = torch.cat([k_nope, k_rope.expand(*k_nope.shape[:-1], -1)], -1)
        return self.kernels.attention(q, k, v, context.mask, self.spec.options)

    def _split_expanded(self, kv: Tensor) -> Sequence[Tensor]:
        """Return keys (..., heads, qk_nope_head_dim) and values (..., heads, v_head_dim) from projected latents."""
        spec = self.spec
        heads = kv.view(*kv.shape[:-1], -1, spec.qk_nope_head_dim + spec.v_head_dim)
        return torch.split(heads, [spec.qk_nope_head_dim, spec.v_head_dim], -1)

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
        outer, heads = architecture.hidden_size, spec.index_n_heads
        self.wq_b = Linear(spec.q_lora_rank, heads * spec.index_head_dim, kernels, style="whole")
        self.wk = Linear(outer, spec.index_head_dim, kernels, style="whole")
        self.k_norm = nn.LayerNorm(spec.index_head_dim, LATENT_EPS)
        self.weights_proj = Linear(outer, heads, kernels, style="whole")

    def forward(self, hidden: Tensor, query_latent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return flat queries, keys and head weights (..., width) for hidden states and latents (..., width)."""
        hidden, query_latent = hidden.detach(), query_latent.detach()
        return self.wq_b(query_latent), self.k_norm(self.wk(hidden)), self.weights_proj(hidden)


class ChoiceAttention(LatentAttention):
    """
    Latent attention to chosen tokens.

    All heads attend to the latents themselves: queries are projected to latents' channels, and so are results back to
    values, because a token's heads then share the keys.
    """

    def attend_to_choice(self, inputs: LatentInputs, choice: Tensor, context: LayerContext) -> tuple[Tensor, Tensor]:
        """
        Return results (rows, length, heads, v_head_dim), and weights like `Kernels.sparse_attention`.

        `choice` is int32 (rows, length, chosen).
        """
        spec, (q_nope, q_rope, latents, k_rope) = self.spec, inputs
        # The identity's projection is the weight, also if the layer has another form of it, or an adapter.
        identity = torch.eye(spec.kv_lora_rank, dtype=latents.dtype, device=latents.device)
        to_keys, to_values = self._split_expanded(self.kv_b_proj(identity))
        latents, k_rope, _ = self.kernels.extend_keys(latents.unsqueeze(-2), k_rope, context.mask)
        q = torch.cat([torch.einsum("rlhn,chn->rlhc", q_nope, to_keys), q_rope], -1)
        joined = torch.cat([latents, k_rope], -1).squeeze(-2)
        mixed, weights = self.kernels.sparse_attention(q, joined, choice, spec.kv_lora_rank, spec.options.scale or 1.0)
        return torch.einsum("rlhc,chv->rlhv", mixed, to_values), weights


class SharedIndexAttention(ChoiceAttention):
    """Latent attention to an earlier indexer's choice."""

    spec: SharedIndexSpec

    def attend(
        self, inputs: LatentInputs, hidden: Tensor, query_latent: Tensor | None, context: LayerContext
    ) -> Tensor:
        return self.attend_to_choice(inputs, context.links[self.spec.link], context)[0]


class SparseLatentAttention(ChoiceAttention):
    """
    Latent attention to the tokens chosen by an indexer.

    The indexer learns from the divergence of its scores' softmax from the heads' mean attention, over the visible
    tokens: all tokens in warm-up, the chosen ones afterwards.
    """

    spec: SparseLatentSpec

    def __init__(self, architecture: DecoderConfig, spec: SparseLatentSpec, kernels: Kernels) -> None:
        super().__init__(architecture, spec, kernels)
        self.indexer = Indexer(architecture, spec, kernels)

    def attend(
        self, inputs: LatentInputs, hidden: Tensor, query_latent: Tensor | None, context: LayerContext
    ) -> Tensor:
        spec, shape, kernels = self.spec, context.documents.shape, self.kernels
        parts = self.indexer(hidden, query_latent)
        queries, keys, factors = (self.ranks.gather_tokens_without_grad_sum(part, shape) for part in parts)
        queries, keys = (
            context.rotate(kernels, x.view(*shape, -1, spec.index_head_dim), spec.index_interleaved)
            for x in (queries, keys)
        )
        keys, _, visible = kernels.extend_keys(keys, keys, context.mask)
        wide = at_least_float32(factors)
        factors = factors.to(wide) * (spec.index_n_heads * spec.index_head_dim) ** -0.5
        first_key, visible_counts = _find_visible_range(context.documents, visible)
        # A kernel is compiled for each size: while a cache grows, only for powers of two.
        size = 1 << (keys.shape[1] - 1).bit_length()
        chosen = min(spec.chosen or size, size)
        choice, scores = kernels.choose_keys(queries, keys.squeeze(-2), factors, first_key, visible_counts, chosen)
        if spec.link:
            context.links.setdefault(spec.link, choice)
        mixed, weights = self.attend_to_choice(inputs, choice, context)
        if context.weights is None or not spec.loss_coef:
            return mixed
        target = self.ranks.all_reduce(weights) * (spec.loss_coef / spec.num_attention_heads)
        learned = scores.log_softmax(-1).masked_fill(choice < 0, 0.0)
        return attach_loss_gradient(mixed, -(target * learned * context.weights.to(wide)[..., None]).sum())


def _find_visible_range(documents: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor]:
    """
    Return the first key that a token sees, and how many it sees, int32 (rows, length), from document ids of this shape.

    With a cache, `visible` is bool (1, length, keys): all keys up to a token's own.
    """
    if visible is not None:
        counts = visible.sum(-1, dtype=torch.int32).expand_as(documents)
        return torch.zeros_like(counts), counts
    index = torch.arange(documents.shape[1], dtype=torch.int32, device=documents.device)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    first = torch.where(begins, index, 0).cummax(1).values
    return first, index + 1 - first
