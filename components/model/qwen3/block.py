"""One layer of the model."""

from typing import Any

from torch import Tensor, nn

from drawloom.components.model.layers.norm import RMSNorm
from drawloom.components.model.qwen3.attention import Attention
from drawloom.components.model.qwen3.config import Qwen3Config
from drawloom.components.ports.model import Kernels


class Block(nn.Module):
    """
    A pre-norm transformer layer: attention, then `mlp`, dense or of experts, each added to the residual stream.

    Modules carry the names of Hugging Face's Qwen3DecoderLayer.
    """

    def __init__(self, architecture: Qwen3Config, kernels: Kernels, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(architecture.hidden_size, architecture.rms_norm_eps, kernels)
        self.self_attn = Attention(architecture, kernels)
        self.post_attention_layernorm = RMSNorm(architecture.hidden_size, architecture.rms_norm_eps, kernels)
        self.mlp = mlp
        self.kernels = kernels

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Any, targets: Tensor | None) -> Tensor:
        """
        Hidden states (rows, length, hidden_size), of the parameters' dtype, in and out.

        cos and sin are float32 (rows, length, head_dim // 2); `mask` is the kernels' attention_mask of the microbatch;
        targets, int64 (rows, length), say which tokens are learned from.
        """
        mixed = self.self_attn(self.input_layernorm(hidden), cos, sin, mask)
        weight, eps = self.post_attention_layernorm.weight, self.post_attention_layernorm.eps
        normed, hidden = self.kernels.add_rms_norm(mixed, hidden, weight, eps)
        return hidden + self.mlp(normed, targets)  # type: ignore[no-any-return]
