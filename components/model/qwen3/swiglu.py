"""The gated feed-forward network of a layer."""

from torch import Tensor, nn

from drawloom.components.model.layers.linear import Linear
from drawloom.components.model.qwen3.config import Qwen3Config
from drawloom.components.ports.model import Kernels


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) for each token; (..., width) in and out. Targets are nothing to it."""

    def __init__(self, architecture: Qwen3Config, kernels: Kernels) -> None:
        super().__init__()
        self.gate = Linear(architecture.hidden_size, architecture.intermediate_size, kernels)
        self.up = Linear(architecture.hidden_size, architecture.intermediate_size, kernels)
        self.down = Linear(architecture.intermediate_size, architecture.hidden_size, kernels)
        self.kernels = kernels

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        return self.down(self.kernels.swiglu(self.gate(hidden), self.up(hidden)))  # type: ignore[no-any-return]
