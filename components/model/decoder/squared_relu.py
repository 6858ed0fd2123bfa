"""Feed-forward networks without a gate, and experts between projections to fewer channels (Nemotron 3)."""

from torch import Tensor

from drawloom.components.model.decoder.config import DecoderConfig
from drawloom.components.model.decoder.expert_config import MoeConfig
from drawloom.components.model.decoder.expert_specs import LatentExpertSpec
from drawloom.components.model.decoder.experts import Experts, SparseMoeBlock
from drawloom.components.model.decoder.specs import LayerContext, MlpSpec
from drawloom.components.model.layers import Linear
from drawloom.components.parallel.tensor_ranks import TensorParallel
from drawloom.ports import Kernels


class SquaredReluMlp(TensorParallel):
    """down_proj(relu(up_proj(x)) ** 2); tensor-parallel ranks partition the inner channels."""

    def __init__(self, architecture: DecoderConfig, spec: MlpSpec, kernels: Kernels) -> None:
        super().__init__()
        outer = architecture.hidden_size
        self.up_proj = Linear(outer, spec.width, kernels)
        self.down_proj = Linear(spec.width, outer, kernels, style="rowwise", is_residual=True)

    def forward(self, hidden: Tensor, context: LayerContext | None = None) -> Tensor:
        """Map hidden states (..., hidden_size), of the parameters' dtype."""
        inner = self.up_proj(self.ranks.gather_tokens(hidden)).relu().square()
        return self.ranks.reduce_scatter_tokens(self.down_proj(inner))


class LatentMoeBlock(SparseMoeBlock):
    """Experts whose inputs and outputs have fewer channels; the shared experts have all."""

    def __init__(self, architecture: MoeConfig, spec: LatentExpertSpec, kernels: Kernels) -> None:
        super().__init__(architecture, spec, kernels)
        outer, latent = architecture.hidden_size, spec.latent_width
        self.experts = Experts(latent, spec, kernels)
        self.fc1_latent_proj = Linear(outer, latent, kernels, style="whole")
        self.fc2_latent_proj = Linear(latent, outer, kernels, style="whole", is_residual=True)

    def apply_experts(self, hidden: Tensor, choices: Tensor, scale: Tensor) -> Tensor:
        return self.fc2_latent_proj(super().apply_experts(self.fc1_latent_proj(hidden), choices, scale))  # type: ignore[no-any-return]
