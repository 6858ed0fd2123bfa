"""A decoder layer: attention, then a gated feed-forward network or experts."""

from typing import Any

from torch import Tensor, nn

from drawloom.components.model.decoder.config import DecoderConfig
from drawloom.components.model.layers import Linear, RMSNorm
from drawloom.components.parallel.tensor import TensorParallel
from drawloom.components.ports.model import Kernels


class Attention(TensorParallel):
    """
    Causal self-attention inside each document, with or without biases and RMSNorm of queries and keys by head.

    Modules carry the names of Hugging Face's attention layers. Ranks share out the heads.
    """

    def __init__(self, architecture: DecoderConfig, kernels: Kernels) -> None:
        super().__init__()
        width, head_dim, has_bias = architecture.hidden_size, architecture.head_dim, architecture.has_bias
        of_queries, of_keys = (
            heads * head_dim for heads in (architecture.num_attention_heads, architecture.num_key_value_heads)
        )
        self.q_proj = Linear(width, of_queries, kernels, has_bias("q_proj"), unit=head_dim)
        self.k_proj = Linear(width, of_keys, kernels, has_bias("k_proj"), unit=head_dim)
        self.v_proj = Linear(width, of_keys, kernels, has_bias("v_proj"), unit=head_dim)
        if architecture.qk_norm:
            self.q_norm = RMSNorm(head_dim, architecture.rms_norm_eps, kernels)
            self.k_norm = RMSNorm(head_dim, architecture.rms_norm_eps, kernels)
        self.o_proj = Linear(of_queries, width, kernels, has_bias("o_proj"), "rowwise", head_dim)
        self.qk_norm = architecture.qk_norm
        self.head_dim = head_dim
        self.kernels = kernels

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Any) -> Tensor:
        """
        Hidden states (rows, length, hidden_size), of the parameters' dtype, in and out; split tokens with `ranks`.

        cos and sin, float32 (rows, length, head_dim // 2), rotate queries and keys; `mask` is what
        the kernels' attention_mask makes of the document ids of a microbatch, within which tokens attend.
        """
        hidden = self.ranks.gather_tokens(hidden, cos.shape[:2])
        by_head = *cos.shape[:2], -1, self.head_dim
        q, k, v = (project(hidden).view(by_head) for project in (self.q_proj, self.k_proj, self.v_proj))
        if self.qk_norm:
            q_weight, k_weight = self.q_norm.weight, self.k_norm.weight
            # One kernel norms and rotates both, as it reads each vector once.
            q, k = self.kernels.qk_norm_rope(q, k, q_weight, k_weight, eps=self.q_norm.eps, cos=cos, sin=sin)
        else:
            q, k = self.kernels.rope(q, cos, sin), self.kernels.rope(k, cos, sin)
        mixed = self.kernels.attention(q, k, v, mask)
        return self.ranks.reduce_scatter_tokens(self.o_proj(mixed.flatten(-2)))


class SwiGLU(TensorParallel):
    """
    down_proj(silu(gate_proj(x)) * up_proj(x)), with the module names of Hugging Face's MLP layers.

    Ranks share out the channels inside.
    """

    def __init__(self, architecture: DecoderConfig, kernels: Kernels) -> None:
        super().__init__()
        width, inner, has_bias = architecture.hidden_size, architecture.intermediate_size, architecture.has_bias
        self.gate_proj = Linear(width, inner, kernels, has_bias("gate_proj"))
        self.up_proj = Linear(width, inner, kernels, has_bias("up_proj"))
        self.down_proj = Linear(inner, width, kernels, has_bias("down_proj"), "rowwise")
        self.kernels = kernels

    def forward(self, hidden: Tensor, weights: Tensor | None = None) -> Tensor:
        """
        Hidden states (..., hidden_size), of the parameters' dtype, in and out; split tokens with `ranks`.

        Weights are not used.
        """
        hidden = self.ranks.gather_tokens(hidden)
        inside = self.kernels.swiglu(self.gate_proj(hidden), self.up_proj(hidden))
        return self.ranks.reduce_scatter_tokens(self.down_proj(inside))


class Block(nn.Module):
    """
    A pre-norm transformer layer: attention, then `mlp`, dense or of experts, each added to the residual stream.

    Modules carry the names of Hugging Face's decoder layers.
    """

    def __init__(self, architecture: DecoderConfig, kernels: Kernels, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(architecture.hidden_size, architecture.rms_norm_eps, kernels)
        self.self_attn = Attention(architecture, kernels)
        self.post_attention_layernorm = RMSNorm(architecture.hidden_size, architecture.rms_norm_eps, kernels)
        self.mlp = mlp
        self.kernels = kernels

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Any, weights: Tensor | None) -> Tensor:
        """
        Hidden states (rows, length, hidden_size), of the parameters' dtype, in and out; split tokens with `ranks`.

        cos and sin are float32 (rows, length, head_dim // 2); `mask` is the kernels' attention_mask of the microbatch;
        weights, float32 (rows, length), say how much each token counts for losses inside of the layer.
        """
        mixed = self.self_attn(self.input_layernorm(hidden), cos, sin, mask)
        # One kernel adds and norms, which saves a pass over memory.
        weight, eps = self.post_attention_layernorm.weight, self.post_attention_layernorm.eps
        normed, hidden = self.kernels.add_rms_norm(mixed, hidden, weight, eps)
        return hidden + self.mlp(normed, weights)  # type: ignore[no-any-return]
