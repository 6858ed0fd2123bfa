"""Mixture of experts: the router, its load-balancing auxiliary loss, and the experts."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from drawloom.components.model.decoder.config import MoeConfig
from drawloom.components.model.layers import Linear
from drawloom.components.ports.model import ExpertKernels


def inject_aux_loss_grad(probabilities: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """
    The probabilities (rows, length, experts) unchanged; the backward pass adds the gradient of each row's loss.

    `chosen`: the experts of each token, int64 (rows, length, choices); `weights`: the weight of each row's loss,
    (rows,). The load-balancing loss of a row is experts * sum over experts of (share of tokens sent to it) * (mean
    probability) (Fedus et al. 2021, "Switch Transformers", arXiv 2101.03961, equation 4), of which only the probability
    has a gradient.
    """
    rows, length, experts = probabilities.shape
    grad_per_choice = weights.to(probabilities.dtype) * (experts / max(length, 1) ** 2)
    aux_grad = probabilities.new_zeros(rows, experts)
    aux_grad.scatter_add_(1, chosen.flatten(1), grad_per_choice.unsqueeze(1).expand(rows, length * chosen.shape[2]))
    return _InjectAuxGrad.apply(probabilities, aux_grad)  # type: ignore[no-untyped-call, no-any-return]


class _InjectAuxGrad(Function):
    @staticmethod
    def forward(ctx: Any, probabilities: Tensor, aux_grad: Tensor) -> Tensor:
        ctx.save_for_backward(aux_grad)
        return probabilities.view_as(probabilities)  # a Function must not return its input itself

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (aux_grad,) = ctx.saved_tensors
        return grad + aux_grad.unsqueeze(1), None


class Router(Linear):
    """The scores of the experts for each token. It is no `Linear` to adapters: PEFT has none for routers."""


class SparseMoeBlock(nn.Module):
    """
    The sum over a token's experts of probability * down(silu(gate(x)) * up(x)).

    Modules and parameters carry the names of transformers 5's Qwen3MoeSparseMoeBlock: the router is `gate`.
    """

    def __init__(self, architecture: MoeConfig, kernels: ExpertKernels) -> None:
        super().__init__()
        self.gate = Router(architecture.hidden_size, architecture.num_experts, kernels)
        self.experts = Experts(architecture, kernels)
        self.architecture = architecture

    def forward(self, hidden: Tensor, weights: Tensor | None = None) -> Tensor:
        """
        Hidden states (rows, length, hidden_size), of the parameters' dtype, in and out.

        With weights of tokens, float32 (rows, length), the backward pass adds gradients of the load-balancing loss.
        """
        chosen, probabilities = self._choose(hidden, weights)
        return self.experts(hidden, chosen, probabilities)  # type: ignore[no-any-return]

    def _choose(self, hidden: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """The experts of each token, int64, and their probabilities, at least float32; (rows, length, choices) both."""
        logits = self.gate(hidden)
        all_probabilities = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        # Which experts are the best has no gradient; only their probabilities do.
        chosen = all_probabilities.detach().topk(self.architecture.num_experts_per_tok).indices
        if weights is not None and self.architecture.router_aux_loss_coef:
            coefficient = self.architecture.router_aux_loss_coef / self.architecture.moe_layers
            # Gradients are divided by the sum of all tokens' weights in the end, so a row counts by its part of that.
            all_probabilities = inject_aux_loss_grad(all_probabilities, chosen, weights.sum(1) * coefficient)
        probabilities = all_probabilities.gather(-1, chosen)
        if self.architecture.norm_topk_prob:
            probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        return chosen, probabilities


class Experts(nn.Module):
    """
    All experts of a layer: `gate_up_proj`, (num_experts, 2 * moe_intermediate_size, hidden_size), whose first half is
    the gate's, and `down_proj`, (num_experts, hidden_size, moe_intermediate_size).
    """

    def __init__(self, architecture: MoeConfig, kernels: ExpertKernels) -> None:
        super().__init__()
        experts, width, inner = architecture.num_experts, architecture.hidden_size, architecture.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, width))
        self.down_proj = nn.Parameter(torch.empty(experts, width, inner))
        self.kernels = kernels

    def forward(self, hidden: Tensor, chosen: Tensor, probabilities: Tensor) -> Tensor:
        """
        Hidden states (rows, length, hidden_size) in and out, through the experts `chosen` for each token, int64
        (rows, length, choices), each weighted by its probability, at least float32 of the same shape.
        """
        routes = self.kernels.moe_routes(chosen.flatten(0, -2), len(self.down_proj))
        rows, scale = self.kernels.moe_permute(hidden.flatten(0, -2), probabilities.flatten(0, -2), routes)
        _, _, ends = routes
        both = self.project("gate_up_proj", rows, ends)
        # `down_proj` is linear, so probabilities may be multiplied in before it, where that costs no pass over memory.
        mixed = self.kernels.swiglu_halves(both, scale)
        down = self.project("down_proj", mixed, ends)
        return self.kernels.moe_unpermute(down, routes).view_as(hidden)

    def project(self, name: str, rows: Tensor, ends: Tensor) -> Tensor:
        """Rows (rows, inputs), sorted by expert, times a parameter (experts, outputs, inputs): (rows, outputs)."""
        return self.kernels.grouped_gemm(rows, getattr(self, name), ends, transposed=True)
