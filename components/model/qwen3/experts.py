"""The feed-forward network of a layer with experts: each token visits a few of many small networks."""

import torch
from torch import Tensor, nn

from drawloom.components.model.layers.aux_loss import inject_aux_loss_grad
from drawloom.components.model.layers.grouped_linear import GroupedLinear
from drawloom.components.model.layers.linear import Linear
from drawloom.components.model.qwen3.config import Qwen3MoeConfig
from drawloom.components.ports.data import IGNORE_INDEX
from drawloom.components.ports.model import ExpertKernels


class Experts(nn.Module):
    """
    The sum over a token's experts of probability * down(silu(gate(x)) * up(x)); (rows, length, width) in and out.

    The probabilities are multiplied in before `down`, which is linear, where it costs no pass of its own.
    """

    def __init__(self, architecture: Qwen3MoeConfig, kernels: ExpertKernels) -> None:
        super().__init__()
        experts, width, inner = architecture.num_experts, architecture.hidden_size, architecture.moe_intermediate_size
        self.router = Linear(width, experts, kernels)
        self.gate_up = GroupedLinear(experts, width, 2 * inner, kernels)
        self.down = GroupedLinear(experts, inner, width, kernels)
        self.architecture = architecture
        self.kernels = kernels

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        chosen, probabilities = self._choose(hidden, targets)
        routes = self.kernels.moe_routes(chosen.flatten(0, -2), self.architecture.num_experts)
        rows, scale = self.kernels.moe_permute(hidden.flatten(0, -2), probabilities.flatten(0, -2), routes)
        _, _, ends = routes
        mixed = self.kernels.swiglu_halves(self.gate_up(rows, ends), scale)
        return self.kernels.moe_unpermute(self.down(mixed, ends), routes).view_as(hidden)

    def _choose(self, hidden: Tensor, targets: Tensor | None) -> tuple[Tensor, Tensor]:
        """The experts of each token, and their probabilities, (rows, length, choices), at least in float32."""
        logits = self.router(hidden)
        all_probabilities = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        chosen = all_probabilities.detach().topk(self.architecture.num_experts_per_tok).indices
        if targets is not None and self.architecture.router_aux_loss_coef:
            weights = (targets != IGNORE_INDEX).sum(1) * (
                self.architecture.router_aux_loss_coef / self.architecture.moe_layers
            )
            all_probabilities = inject_aux_loss_grad(all_probabilities, chosen, weights)
        probabilities = all_probabilities.gather(-1, chosen)
        if self.architecture.norm_topk_prob:
            probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        return chosen, probabilities
