"""The gated feed-forward network of a layer."""

from torch import Tensor, nn

from drawloom.components.model.qwen3.architecture import Architecture
from drawloom.components.ports.model import Kernels


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)) for each token; (..., width) in and out."""

    def __init__(self, architecture: Architecture, kernels: Kernels) -> None:
        super().__init__()
        self.gate = nn.Linear(architecture.width, architecture.feed_forward, bias=False)
        self.up = nn.Linear(architecture.width, architecture.feed_forward, bias=False)
        self.down = nn.Linear(architecture.feed_forward, architecture.width, bias=False)
        self.kernels = kernels

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(self.kernels.swiglu(self.gate(hidden), self.up(hidden)))  # type: ignore[no-any-return]
