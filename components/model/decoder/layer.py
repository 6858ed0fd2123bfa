"""A decoder layer: branches of attention, a gated feed-forward network or experts on a residual stream."""

from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor, nn

from drawloom.components.model.decoder.config import DecoderConfig
from drawloom.components.model.decoder.specs import Branch, LayerContext
from drawloom.components.model.layers import RMSNorm
from drawloom.ports import Kernels, NormAndSum


class Block(nn.Module):
    """
    A transformer layer of several branches: norm, module and norm, added to the residual stream.

    Modules carry the names of Hugging Face's decoder layers.
    """

    def __init__(self, architecture: DecoderConfig, branches: Sequence[Branch], kernels: Kernels) -> None:
        super().__init__()
        self.branches = tuple(branches)
        self.residual_multiplier = architecture.residual_multiplier
        self.kernels = kernels
        for branch in self.branches:
            for name in filter(None, (branch.norm_before, branch.norm_after)):
                norm = RMSNorm(architecture.hidden_size, architecture.rms_norm_eps, kernels, architecture.zero_centered)
                self.add_module(name, norm)
            self.add_module(branch.name, branch.spec.build(architecture, kernels))

    @property
    def cost_key(self) -> Hashable:
        return None if any(branch.spec.is_linked for branch in self.branches) else self.branches

    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor:
        """Map hidden states (rows, length, hidden_size), or (tokens, hidden_size) if ranks split them."""
        output: Tensor | None = None  # the last branch's; the next norm's kernel adds it
        for branch in self.branches:
            inputs, hidden = self.add_and_norm(output, hidden, branch)
            output = self.get_submodule(branch.name)(inputs, context)
            if branch.norm_after is not None:
                output = self.get_submodule(branch.norm_after)(output)
            if self.residual_multiplier != 1.0:
                output = output * self.residual_multiplier
        return hidden if output is None else hidden + output

    def add_and_norm(self, output: Tensor | None, hidden: Tensor, branch: Branch) -> NormAndSum:
        """Add a branch's output to the residual stream; return the next branch's normed input and the stream."""
        if branch.norm_before is None:
            summed = hidden if output is None else hidden + output
            return NormAndSum(summed, summed)
        norm: Any = self.get_submodule(branch.norm_before)
        if output is None:
            return NormAndSum(norm(hidden), hidden)
        # One kernel adds and norms, which saves a pass over memory.
        return self.kernels.add_rms_norm(output, hidden, norm.weight, norm.eps, norm.zero_centered)
