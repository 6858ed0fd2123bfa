"""The gated feed-forward network of a layer."""

from torch import Tensor, nn

from drawloom.components.model.layers.linear import Linear
from drawloom.components.model.qwen3.config import Architecture
from drawloom.components.ports.model import Kernels


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)) for each token; (..., width) in and out. Targets are nothing to it."""

    def __init__(self, architecture: Architecture, kernels: Kernels) -> None:
        super().__init__()
        self.gate = Linear(architecture.width, architecture.feed_forward, kernels)
        self.up = Linear(architecture.width, architecture.feed_forward, kernels)
        self.down = Linear(architecture.feed_forward, architecture.width, kernels)
        self.kernels = kernels

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        return self.down(self.kernels.swiglu(self.gate(hidden), self.up(hidden)))  # type: ignore[no-any-return]
