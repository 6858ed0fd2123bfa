"""Kimi Delta Attention: a gated delta net with a decay for every key channel (arXiv 2510.26692)."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drawloom.components.model.decoder.gated_delta_net import GatedDeltaNet
from drawloom.components.model.decoder.mixer_specs import ChannelDeltaSpec
from drawloom.components.model.layers import Linear
from drawloom.components.parallel.parameter_split import SplitDim


class ChannelDeltaNet(GatedDeltaNet):
    """Gated delta net whose decays, by channel, and sigmoid gates are projected from few channels."""

    spec: ChannelDeltaSpec
    least_rate = 1.0

    def add_gate_projections(self, outer: int) -> None:
        spec = self.spec
        keys, values = spec.value_heads * spec.key_dim, spec.value_heads * spec.value_dim
        for name, width, unit in (("f", keys, spec.key_dim), ("g", values, spec.value_dim)):
            self.add_module(f"{name}_a_proj", Linear(outer, spec.rank, self.kernels, style="whole"))
            self.add_module(f"{name}_b_proj", Linear(spec.rank, width, self.kernels, unit=self.group * unit))
        self.in_proj_b = Linear(outer, spec.value_heads, self.kernels, unit=self.group)
        self.dt_bias = nn.Parameter(torch.ones(keys))

    def compute_log_decays(self, hidden: Tensor, own: Tensor) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        steps = F.softplus(self._project_from_few_channels("f", hidden, own).to(wide) + self.dt_bias.to(wide))
        return -self.A_log.to(wide).exp()[:, None] * steps.view(*steps.shape[:-1], -1, self.spec.key_dim)

    def gate_outputs(self, normed: Tensor, hidden: Tensor, own: Tensor) -> Tensor:
        return normed * self._project_from_few_channels("g", hidden, own).view(normed.shape).sigmoid()

    def _project_from_few_channels(self, name: str, hidden: Tensor, own: Tensor) -> Tensor:
        """Project this rank's tokens `own` to few channels, and all tokens' channels to (rows, length, width)."""
        few = self.ranks.gather_tokens(self.get_submodule(f"{name}_a_proj")(own), hidden.shape[:2])
        projected: Tensor = self.get_submodule(f"{name}_b_proj")(few)
        return projected

    def split_dims(self) -> Mapping[str, SplitDim]:
        return {**super().split_dims(), "dt_bias": SplitDim(0, self.group * self.spec.key_dim)}
