"""Counts the floating-point operations of a decoder."""

from collections import Counter

from torch import nn

from drawloom.components.model.decoder.config import DecoderConfig, MoeConfig
from drawloom.components.ports.flops import ForwardFlops


def forward_flops(whole: nn.Module, architecture: DecoderConfig) -> ForwardFlops:
    """Those of a whole model, which may be on the meta device."""
    visited = 1.0
    if isinstance(architecture, MoeConfig):
        visited = architecture.num_experts_per_tok / architecture.num_experts
    by_parameter = {}
    for name, parameter in whole.named_parameters():
        # An embedding is looked up, and multiplied by only where it is the head, too.
        is_table = ".embed_tokens." in name and not architecture.tie_word_embeddings
        if parameter.ndim > 1 and not is_table:
            # Parameters of three dimensions are those of experts.
            by_parameter[name] = 2.0 * parameter.numel() * (visited if parameter.ndim == 3 else 1.0)
    per_pair: Counter[int | None] = Counter()
    for layer in range(architecture.num_hidden_layers):
        # A product with the key, and one with the value.
        per_pair[architecture.window_of(layer)] += 4 * architecture.num_attention_heads * architecture.head_dim
    return ForwardFlops(by_parameter, {window: float(flops) for window, flops in per_pair.items()})
