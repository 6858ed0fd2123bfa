"""Parts of Gemma 4: normed values, shared keys, experts between norms, per-layer embeddings and bounded logits."""

from typing import Any

import torch
from torch import Tensor, nn

from drawloom.components.model.decoder.branch_specs import ExpertSpec, PerLayerInputSpec
from drawloom.components.model.decoder.config import DecoderConfig
from drawloom.components.model.decoder.experts import ExpertChoices, Router, SparseMoeBlock
from drawloom.components.model.decoder.layer import Attention, Block
from drawloom.components.model.decoder.model import CausalLM, Decoder
from drawloom.components.model.decoder.specs import AttentionSpec, LayerContext
from drawloom.components.model.layers import ChunkedHead, Embedding, Linear, RMSNorm, at_least_float32
from drawloom.components.parallel.tensor_ranks import TensorParallel
from drawloom.ports import Finish, Head, Kernels, LayerRange, TokenContext


class CappedCausalLM(CausalLM):
    """Span of a model whose logits are bounded by the config's `final_logit_softcapping`, unless it is None."""

    def forward(self, inputs: Tensor, shared: TokenContext, finish: Finish | None = None) -> Any:
        """Apply `CausalLM`, with bounded logits, to inputs (rows, length) or hidden states (rows, length, width)."""
        architecture: Any = self.model.architecture
        size, cap = architecture.vocab_size, architecture.final_logit_softcapping
        if finish is None or cap is None:
            return super().forward(inputs, shared, finish)

        def finish_with_cap(hidden: Tensor, head: Head) -> Any:
            def project(hidden: Tensor) -> Tensor:
                logits = head.logits(hidden)
                return cap * (logits.to(at_least_float32(logits)) / cap).tanh()  # type: ignore[no-any-return]

            return finish(hidden, ChunkedHead(project, size))

        return super().forward(inputs, shared, finish_with_cap)


class ScaledBlock(Block):
    """Layer whose output is multiplied by `layer_scalar` (1,), which files have, and which is not trained."""

    layer_scalar: Tensor

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.register_buffer("layer_scalar", torch.ones(1))

    def reset_parameters(self) -> None:
        """Fill the number with 1."""
        self.layer_scalar.fill_(1.0)

    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor:
        """Return the layer's result times its number: (rows, length, width)."""
        return super().forward(hidden, context) * self.layer_scalar.to(hidden.dtype)


class NormedValueAttention(Attention):
    """Attention whose values are normed by head, without a weight; keys and values stay for later layers."""

    def norm_and_rotate(self, q: Tensor, k: Tensor, v: Tensor, context: LayerContext) -> tuple[Tensor, Tensor, Tensor]:
        ones = v.new_ones(self.spec.head_dim, dtype=at_least_float32(v))
        q, k, v = super().norm_and_rotate(q, k, self.kernels.rms_norm(v, ones, self.q_norm.eps), context)
        if self.spec.link:
            context.links.setdefault(self.spec.link, (k, v))  # recomputation leaves the first ones, which have a graph
        return q, k, v


class SharedKeysAttention(TensorParallel):
    """Attention whose keys and values are an earlier layer's. A cache keeps them again."""

    def __init__(self, architecture: DecoderConfig, spec: AttentionSpec, kernels: Kernels) -> None:
        super().__init__()
        outer, unit, bias = architecture.hidden_size, spec.head_dim, architecture.attention_bias
        inner = spec.num_attention_heads * unit
        self.q_proj = Linear(outer, inner, kernels, bias, unit=unit)
        self.q_norm = RMSNorm(unit, architecture.rms_norm_eps, kernels)
        self.o_proj = Linear(inner, outer, kernels, architecture.output_bias, "rowwise", unit, is_residual=True)
        self.spec = spec
        self.kernels = kernels

    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor:
        """Map hidden states (rows, length, hidden_size), or (tokens, hidden_size) if ranks split them."""
        shape = context.documents.shape
        q = self.q_norm(self.q_proj(self.ranks.gather_tokens(hidden, shape)).view(*shape, -1, self.spec.head_dim))
        k, v = context.links[self.spec.link]
        mixed = self.kernels.attention(context.rotate(self.kernels, q), k, v, context.mask, self.spec.options)
        return self.ranks.reduce_scatter_tokens(self.o_proj(mixed.flatten(-2)))


class NormedRouter(Router):
    """Router that norms its inputs, multiplies their channels by `scale`, and experts' weights by one number each."""

    def __init__(self, hidden_size: int, spec: ExpertSpec, kernels: Kernels) -> None:
        super().__init__(hidden_size, spec, kernels)
        self.scale = nn.Parameter(torch.ones(hidden_size))
        self.per_expert_scale = nn.Parameter(torch.ones(spec.num_experts))

    def forward(  # type: ignore[override]
        self, hidden: Tensor, weights: Tensor | None = None, padding: Tensor | None = None
    ) -> ExpertChoices:
        """Choose experts for hidden states (..., hidden_size); see `Router`."""
        normed = self.kernels.rms_norm(hidden, self.scale * hidden.shape[-1] ** -0.5, self.spec.rms_norm_eps)
        chosen, best = super().forward(normed, weights, padding)
        return ExpertChoices(chosen, best * self.per_expert_scale.to(best.dtype)[chosen])


class NormedMoeBlock(SparseMoeBlock):
    """Feed-forward network plus experts, both with norms before and after."""

    router_class = NormedRouter

    def __init__(self, architecture: DecoderConfig, spec: ExpertSpec, kernels: Kernels) -> None:
        super().__init__(architecture, spec, kernels)
        width, eps = architecture.hidden_size, architecture.rms_norm_eps
        self.pre_feedforward_layernorm = RMSNorm(width, eps, kernels)
        self.pre_feedforward_layernorm_2 = RMSNorm(width, eps, kernels)
        self.post_feedforward_layernorm_1 = RMSNorm(width, eps, kernels)
        self.post_feedforward_layernorm_2 = RMSNorm(width, eps, kernels)

    def apply_shared_experts(self, hidden: Tensor) -> Tensor:
        shared = super().apply_shared_experts(self.pre_feedforward_layernorm(hidden))
        return self.post_feedforward_layernorm_1(shared)  # type: ignore[no-any-return]

    def apply_experts(self, hidden: Tensor, choices: Tensor, scale: Tensor) -> Tensor:
        mixed = super().apply_experts(self.pre_feedforward_layernorm_2(hidden), choices, scale)
        return self.post_feedforward_layernorm_2(mixed)  # type: ignore[no-any-return]


class PerLayerDecoder(Decoder):
    """Decoder with a second embedding table, unless the config's width for it is 0."""

    def __init__(self, architecture: Any, span: LayerRange, kernels: Kernels) -> None:
        super().__init__(architecture, span, kernels)
        self.width: int = architecture.hidden_size_per_layer_input
        if self.width and span.embedding:
            outer, inner = architecture.hidden_size, architecture.num_hidden_layers * self.width
            self.embed_tokens_per_layer = Embedding(architecture.vocab_size, inner, kernels)
            self.per_layer_model_projection = Linear(outer, inner, kernels, style="whole")
            self.per_layer_projection_norm = RMSNorm(self.width, architecture.rms_norm_eps, kernels)

    def build_layer_contexts(self, shared: TokenContext, inputs: Tensor, hidden: Tensor) -> list[LayerContext]:
        contexts = super().build_layer_contexts(shared, inputs, hidden)
        if self.width:
            rows = self.ranks.reduce_scatter_tokens(self.embed_tokens_per_layer(inputs))
            # transformers rounds the factor to the table's dtype.
            rows = rows * torch.tensor(self.width**0.5, device="cpu").to(rows.dtype).item()
            projected = self.per_layer_model_projection(hidden) * hidden.shape[-1] ** -0.5
            normed = self.per_layer_projection_norm(projected.unflatten(-1, (-1, self.width)))
            contexts[0].links["per_layer"] = ((normed + rows.view(normed.shape)) * 0.5**0.5).unbind(-2)
        return contexts


class PerLayerInput(nn.Module):
    """up(gelu(gate(x)) * the layer's channels), on this rank's tokens."""

    def __init__(self, architecture: DecoderConfig, spec: PerLayerInputSpec, kernels: Kernels) -> None:
        super().__init__()
        outer = architecture.hidden_size
        self.per_layer_input_gate = Linear(outer, spec.width, kernels, style="whole")
        self.per_layer_projection = Linear(spec.width, outer, kernels, style="whole", is_residual=True)
        self.spec = spec
        self.kernels = kernels

    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor:
        """Map hidden states (..., hidden_size)."""
        own = context.links["per_layer"][self.spec.number].contiguous()
        return self.per_layer_projection(self.kernels.geglu(self.per_layer_input_gate(hidden), own))  # type: ignore[no-any-return]
