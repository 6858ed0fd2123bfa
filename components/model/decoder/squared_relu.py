"""Feed-forward networks without a gate, and experts between projections to fewer channels (Nemotron 3)."""

from torch import Tensor

from drawloom.components.model.decoder.expert_config import MoeConfig
from drawloom.components.model.decoder.expert_specs import ExpertSpec
from drawloom.components.model.decoder.experts import SparseMoeBlock
from drawloom.components.model.decoder.mlp import GatedMlp
from drawloom.components.model.layers import Linear
from drawloom.ports import Kernels


class SquaredReluMlp(GatedMlp):
    """down_proj(relu(up_proj(x)) ** 2)."""

    inner_projections = ("up_proj",)

    def compute_partial_outputs(self, hidden: Tensor) -> Tensor:
        return self.down_proj(self.up_proj(hidden).relu().square())  # type: ignore[no-any-return]


class LatentMoeBlock(SparseMoeBlock):
    """Experts whose inputs and outputs have fewer channels; the shared experts have all."""

    def __init__(self, architecture: MoeConfig, spec: ExpertSpec, kernels: Kernels) -> None:
        super().__init__(architecture, spec, kernels)
        outer = architecture.hidden_size
        latent = spec.latent_width or outer
        self.fc1_latent_proj = Linear(outer, latent, kernels, style="whole")
        self.fc2_latent_proj = Linear(latent, outer, kernels, style="whole", is_residual=True)

    def apply_experts(self, hidden: Tensor, choices: Tensor, scale: Tensor) -> Tensor:
        return self.fc2_latent_proj(super().apply_experts(self.fc1_latent_proj(hidden), choices, scale))  # type: ignore[no-any-return]
