"""Gated feed-forward network (Shazeer 2020, arXiv 2002.05202)."""

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from drawloom.components.model.decoder.config import DecoderConfig
from drawloom.components.model.decoder.specs import LayerContext, MlpSpec
from drawloom.components.model.layers import Linear
from drawloom.components.parallel.tensor_ranks import TensorParallel
from drawloom.ports import Kernels


class GatedMlp(TensorParallel):
    """
    down_proj(activation(gate_proj(x)) * up_proj(x)), with the module names of Hugging Face's MLP layers.

    Tensor-parallel ranks partition the inner channels.
    """

    gate_proj: Linear
    up_proj: Linear
    inner_projections: ClassVar[Sequence[str]] = ("gate_proj", "up_proj")

    def __init__(self, architecture: DecoderConfig, spec: MlpSpec, kernels: Kernels) -> None:
        super().__init__()
        outer, inner, has_bias = architecture.hidden_size, spec.width, architecture.has_bias
        for name in self.inner_projections:
            self.add_module(name, Linear(outer, inner, kernels, has_bias(name)))
        self.down_proj = Linear(inner, outer, kernels, has_bias("down_proj"), "rowwise", is_residual=True)
        self.activation = spec.activation
        self.kernels = kernels

    def forward(self, hidden: Tensor, context: LayerContext | None = None) -> Tensor:
        """Map hidden states (..., hidden_size), of the parameters' dtype."""
        return self.ranks.reduce_scatter_tokens(self.compute_partial_outputs(self.ranks.gather_tokens(hidden)))

    def compute_partial_outputs(self, hidden: Tensor) -> Tensor:
        """Apply this rank's inner channels to all tokens' hidden states (..., hidden_size); return partial sums."""
        activation = self.kernels.swiglu if self.activation == "silu" else self.kernels.geglu
        output: Tensor = self.down_proj(activation(self.gate_proj(hidden), self.up_proj(hidden)))
        return output
