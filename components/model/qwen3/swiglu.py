"""The gated feed-forward network of a layer."""

from torch import Tensor, nn

from drawloom.components.model.layers.linear import Linear
from drawloom.components.model.qwen3.config import Qwen3Config
from drawloom.components.ports.model import Kernels


class SwiGLU(nn.Module):
    """down_proj(silu(gate_proj(x)) * up_proj(x)), with the module names of Hugging Face's Qwen3MLP."""

    def __init__(self, architecture: Qwen3Config, kernels: Kernels) -> None:
        super().__init__()
        self.gate_proj = Linear(architecture.hidden_size, architecture.intermediate_size, kernels)
        self.up_proj = Linear(architecture.hidden_size, architecture.intermediate_size, kernels)
        self.down_proj = Linear(architecture.intermediate_size, architecture.hidden_size, kernels)
        self.kernels = kernels

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        """Hidden states (..., hidden_size), of the parameters' dtype, in and out; targets are not used."""
        return self.down_proj(self.kernels.swiglu(self.gate_proj(hidden), self.up_proj(hidden)))  # type: ignore[no-any-return]
