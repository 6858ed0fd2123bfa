"""Mixture of experts: a router, and the experts that it sends tokens to."""

import attrs
import torch
from torch import Tensor, nn

from drawloom.components.experts.local import LocalExperts
from drawloom.components.model.decoder.config import MoeConfig
from drawloom.components.model.decoder.layer import SwiGLU
from drawloom.components.model.decoder.router import Router
from drawloom.components.parallel.expert import ExpertParallel
from drawloom.components.ports.experts import ExpertKernels


class SparseMoeBlock(nn.Module):
    """
    The sum over a token's experts of probability * down(silu(gate(x)) * up(x)); each rank routes its own tokens.

    Modules and parameters carry the names of transformers 5's Qwen3MoeSparseMoeBlock: the router is `gate`.
    """

    def __init__(self, architecture: MoeConfig, kernels: ExpertKernels) -> None:
        super().__init__()
        self.gate = Router(
            architecture.hidden_size,
            architecture.num_experts,
            architecture.num_experts_per_tok,
            architecture.routing,
            kernels,
            aux_loss_coef=architecture.router_aux_loss_coef / architecture.moe_layers,
            z_loss_coef=architecture.router_z_loss_coef / architecture.moe_layers,
        )
        self.experts = Experts(architecture, kernels)

    def forward(self, hidden: Tensor, weights: Tensor | None = None) -> Tensor:
        """
        Hidden states (rows, length, hidden_size), of the parameters' dtype, in and out; split tokens with `ranks`.

        With weights of tokens, float32 (rows, length), the backward pass adds gradients of the router's losses.
        """
        chosen, probabilities = self.gate(hidden, weights)
        tokens, choices, scale = (each.flatten(0, -2) for each in (hidden, chosen, probabilities))
        # A view of what experts give is taken here, since FSDP warns of modules that give views.
        return self.experts(tokens, choices, scale).view_as(hidden)  # type: ignore[no-any-return]


class SharedExpertsMoeBlock(SparseMoeBlock):
    """
    The same, and a feed-forward network that all tokens visit (Dai et al. 2024, DeepSeekMoE, arXiv 2401.06066).

    It is as wide as `n_shared_experts` experts, which are `shared_experts` in transformers.
    """

    def __init__(self, architecture: MoeConfig, n_shared_experts: int, kernels: ExpertKernels) -> None:
        super().__init__(architecture, kernels)
        width = n_shared_experts * architecture.moe_intermediate_size
        self.shared_experts = SwiGLU(attrs.evolve(architecture, intermediate_size=width), kernels)

    def forward(self, hidden: Tensor, weights: Tensor | None = None) -> Tensor:
        """As of the experts alone: hidden states (rows, length, hidden_size) in and out, of the parameters' dtype."""
        return super().forward(hidden, weights) + self.shared_experts(hidden)  # type: ignore[no-any-return]


class Experts(ExpertParallel):
    """
    All experts of a layer: `gate_up_proj`, (num_experts, 2 * moe_intermediate_size, hidden_size), whose first half is
    the gate's, and `down_proj`, (num_experts, hidden_size, moe_intermediate_size). Ranks can share them out.
    """

    def __init__(self, architecture: MoeConfig, kernels: ExpertKernels) -> None:
        super().__init__()
        experts, width, inner = architecture.num_experts, architecture.hidden_size, architecture.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, width))
        self.down_proj = nn.Parameter(torch.empty(experts, width, inner))
        self.num_experts = experts
        self.kernels = kernels

    def forward(self, hidden: Tensor, chosen: Tensor, probabilities: Tensor) -> Tensor:
        """
        Hidden states (tokens, hidden_size) in and out, through the experts `chosen` for each token, int64 (tokens,
        choices), each weighted by its probability, at least float32 of the same shape.
        """
        dispatcher = self.dispatcher or LocalExperts(kernels=self.kernels)
        here = dispatcher.dispatch(hidden, chosen, probabilities, self.num_experts)
        both = self.project("gate_up_proj", here.rows, here.ends)
        # `down_proj` is linear, so probabilities may be multiplied in before it, where that costs no pass over memory.
        mixed = self.kernels.swiglu_halves(both, here.scale)
        return here.combine(self.project("down_proj", mixed, here.ends))

    def project(self, name: str, rows: Tensor, ends: Tensor) -> Tensor:
        """Rows (rows, inputs), sorted by expert, times a parameter (experts, outputs, inputs): (rows, outputs)."""
        return self.kernels.grouped_gemm(rows, getattr(self, name), ends, transposed=True)
