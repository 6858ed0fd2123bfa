"""Grouped-query attention with normalised queries and keys."""

from torch import Tensor, nn

from drawloom.components.model.layers.linear import Linear
from drawloom.components.model.layers.norm import RMSNorm
from drawloom.components.model.qwen3.config import Qwen3Config
from drawloom.components.ports.model import Kernels


class Attention(nn.Module):
    """Mixes the tokens of each document; hidden states (rows, length, width) in and out."""

    def __init__(self, architecture: Qwen3Config, kernels: Kernels) -> None:
        super().__init__()
        width, head_dim = architecture.hidden_size, architecture.head_dim
        self.q = Linear(width, architecture.num_attention_heads * head_dim, kernels)
        self.k = Linear(width, architecture.num_key_value_heads * head_dim, kernels)
        self.v = Linear(width, architecture.num_key_value_heads * head_dim, kernels)
        self.q_norm = RMSNorm(head_dim, architecture.rms_norm_eps, kernels)
        self.k_norm = RMSNorm(head_dim, architecture.rms_norm_eps, kernels)
        self.out = Linear(architecture.num_attention_heads * head_dim, width, kernels)
        self.head_dim = head_dim
        self.kernels = kernels

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, documents: Tensor) -> Tensor:
        q, k, v = (self._split(project(hidden)) for project in (self.q, self.k, self.v))
        weights, eps = (self.q_norm.weight, self.k_norm.weight), self.q_norm.eps
        q, k = self.kernels.qk_norm_rope(q, k, *weights, eps, cos, sin)
        mixed = self.kernels.attention(q, k, v, documents)
        return self.out(mixed.flatten(-2))  # type: ignore[no-any-return]

    def _split(self, x: Tensor) -> Tensor:
        """(rows, length, heads * head_dim) as (rows, length, heads, head_dim)."""
        return x.view(*x.shape[:-1], -1, self.head_dim)
