"""Gated short convolution in place of attention (LFM2, Liquid AI 2025, arXiv 2511.23404)."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from drawloom.components.model.decoder.config import DecoderConfig
from drawloom.components.model.decoder.mixer_specs import ShortConvSpec
from drawloom.components.model.decoder.specs import LayerContext
from drawloom.components.model.layers import Linear
from drawloom.components.parallel.parameter_split import SplitDim
from drawloom.components.parallel.tensor_ranks import TensorParallel
from drawloom.ports import Kernels, Role


class ShortConvolution(TensorParallel):
    """
    out_proj(c * convolution(b * x)) for projections b, c and x, channel by channel inside each document.

    Tensor-parallel ranks partition the channels. Files join the three projections.
    """

    def __init__(self, architecture: DecoderConfig, spec: ShortConvSpec, kernels: Kernels) -> None:
        super().__init__()
        width = architecture.hidden_size
        for name in "bcx":
            self.add_module(f"in_proj_{name}", Linear(width, width, kernels))
        self.taps = nn.Parameter(torch.zeros(width, spec.taps))
        self.out_proj = Linear(width, width, kernels, style="rowwise", is_residual=True)
        self.kernels = kernels

    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor:
        """Map hidden states (rows, length, hidden_size), or (tokens, hidden_size) if ranks split them."""
        hidden = self.ranks.gather_tokens(hidden, context.documents.shape)
        b, c, x = (self.get_submodule(f"in_proj_{name}")(hidden) for name in "bcx")
        mixed = self.kernels.causal_conv(b * x, self.taps, context.recurrence, silu=False)
        return self.ranks.reduce_scatter_tokens(self.out_proj(c * mixed))

    def split_dims(self) -> Mapping[str, SplitDim]:
        return {"taps": SplitDim(0)}

    def parameter_roles(self) -> Mapping[str, Role]:
        return {"taps": Role(False, "normal", 1.0)}
