"""Per-layer embeddings: each layer has a gate on channels of its own, looked up by token (Gemma 4)."""

from typing import Any

import torch
from torch import Tensor, nn

from drawloom.components.model.decoder.config import DecoderConfig
from drawloom.components.model.decoder.mixer_specs import PerLayerInputSpec
from drawloom.components.model.decoder.model import Decoder
from drawloom.components.model.decoder.specs import LayerContext
from drawloom.components.model.layers import Embedding, Linear, RMSNorm
from drawloom.ports import Kernels, LayerRange, TokenContext

LINK = "per_layer"


class PerLayerDecoder(Decoder):
    """Decoder with a second table of embeddings, unless the config's width for it is 0."""

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
            contexts[0].links[LINK] = ((normed + rows.view(normed.shape)) * 0.5**0.5).unbind(-2)
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
        own = context.links[LINK][self.spec.number].contiguous()
        return self.per_layer_projection(self.kernels.geglu(self.per_layer_input_gate(hidden), own))  # type: ignore[no-any-return]
