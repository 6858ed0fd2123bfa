"""One layer of the model."""

from torch import Tensor, nn

from drawloom.components.model.layers.norm import RMSNorm
from drawloom.components.model.qwen3.attention import Attention
from drawloom.components.model.qwen3.config import Qwen3Config
from drawloom.components.ports.model import BatchContext, Kernels


class Block(nn.Module):
    """Attention, then a feed-forward network, dense or of experts, each behind a norm and added to what came in."""

    def __init__(self, architecture: Qwen3Config, kernels: Kernels, feed_forward: nn.Module) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(architecture.hidden_size, architecture.rms_norm_eps, kernels)
        self.attention = Attention(architecture, kernels)
        self.feed_forward_norm = RMSNorm(architecture.hidden_size, architecture.rms_norm_eps, kernels)
        self.feed_forward = feed_forward
        self.kernels = kernels

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, shared: BatchContext) -> Tensor:
        mixed = self.attention(self.attention_norm(hidden), cos, sin, shared.document_ids)
        weight, eps = self.feed_forward_norm.weight, self.feed_forward_norm.eps
        normed, hidden = self.kernels.add_rms_norm(mixed, hidden, weight, eps)
        return hidden + self.feed_forward(normed, shared.targets)  # type: ignore[no-any-return]
