"""Mixture of experts: a router, and the experts that it sends tokens to."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from drawloom.components.experts.local import LocalExperts
from drawloom.components.model.decoder.config import MoeConfig
from drawloom.components.model.decoder.context import LayerContext
from drawloom.components.model.decoder.mlp import GatedMlp
from drawloom.components.model.decoder.router import Router
from drawloom.components.model.decoder.specs import ExpertSpec, MlpSpec
from drawloom.components.parallel.expert import ExpertParallel
from drawloom.components.ports.experts import ExpertKernels
from drawloom.components.ports.parameter_roles import Role


class SparseMoeBlock(nn.Module):
    """
    Sum over a token's experts of probability * down(silu(gate(x)) * up(x)); each rank routes its own tokens.

    With `shared_width`, the output of a feed-forward network that all tokens visit is added (Dai et al. 2024,
    DeepSeekMoE, arXiv 2401.06066). Modules and parameters carry the names of transformers 5.
    """

    def __init__(self, architecture: MoeConfig, spec: ExpertSpec, kernels: ExpertKernels) -> None:
        super().__init__()
        self.gate = Router(
            architecture.hidden_size,
            spec.experts,
            spec.choices,
            spec.routing,
            kernels,
            aux_loss_coef=spec.aux_loss_coef,
            z_loss_coef=spec.z_loss_coef,
        )
        self.experts = Experts(architecture.hidden_size, spec, kernels)
        self.has_shared = spec.shared_width > 0
        if self.has_shared:
            self.shared_experts = GatedMlp(architecture, MlpSpec(width=spec.shared_width), kernels)

    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor:
        """
        Map hidden states (rows, length, hidden_size), of the parameters' dtype; split tokens with `ranks`.

        With weights of tokens in the context, the backward pass adds gradients of the router's losses.
        """
        chosen, probabilities = self.gate(hidden, context.weights)
        tokens, choices, scale = (tensor.flatten(0, -2) for tensor in (hidden, chosen, probabilities))
        # The view of the experts' output is made here, since FSDP warns of modules that return views.
        mixed: Tensor = self.experts(tokens, choices, scale).view_as(hidden)
        return mixed + self.shared_experts(hidden) if self.has_shared else mixed


class Experts(ExpertParallel):
    """
    Experts of a layer: `gate_up_proj` (experts, 2 * inner width, hidden_size), whose first half is the gate's, and
    `down_proj` (experts, hidden_size, inner width). Expert-parallel ranks partition the experts.
    """

    def __init__(self, width: int, spec: ExpertSpec, kernels: ExpertKernels) -> None:
        super().__init__()
        experts, inner = spec.experts, spec.width
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, width))
        self.down_proj = nn.Parameter(torch.empty(experts, width, inner))
        self.num_experts = experts
        self.visited = spec.choices / spec.experts
        self.kernels = kernels

    def parameter_roles(self) -> Mapping[str, Role]:
        return {
            "gate_up_proj": Role(True, "normal", self.visited),
            "down_proj": Role(True, "residual", self.visited),
        }

    def forward(self, hidden: Tensor, chosen: Tensor, probabilities: Tensor) -> Tensor:
        """
        Map hidden states (tokens, hidden_size) by the experts `chosen` for each token, int64 (tokens, choices).

        Outputs are weighted by `probabilities`, at least float32 (tokens, choices), and summed by token.
        """
        dispatcher = self.dispatcher or LocalExperts(kernels=self.kernels)
        here = dispatcher.dispatch(hidden, chosen, probabilities, self.num_experts)
        both = self.project("gate_up_proj", here.rows, here.ends)
        # `down_proj` is linear, so probabilities may be multiplied in before it, where that costs no pass over memory.
        mixed = self.kernels.swiglu_halves(both, here.scale)
        return here.combine(self.project("down_proj", mixed, here.ends))

    def project(self, name: str, rows: Tensor, ends: Tensor) -> Tensor:
        """Multiply rows (rows, inputs), sorted by expert, by a parameter (experts, outputs, inputs)."""
        return self.kernels.grouped_gemm(rows, getattr(self, name), ends, transposed=True)
