"""Mixture of experts: the router, its load-balancing auxiliary loss, and the experts."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from drawloom.components.distributed.expert_parallel import ExpertParallel
from drawloom.components.distributed.row_sums import RowSums
from drawloom.components.experts.local import LocalExperts
from drawloom.components.model.decoder.config import MoeConfig
from drawloom.components.model.layers import Linear
from drawloom.components.ports.model import ExpertKernels


def aux_loss_grad(counts: Tensor, weights: Tensor, length: int) -> Tensor:
    """
    The gradient of each row's load-balancing loss with respect to the probabilities of a token, (rows, experts).

    `counts`: how many tokens of a row were sent to each expert, (rows, experts); `weights`: the weight of each row's
    loss, (rows,). The loss of a row of `length` tokens is experts * sum over experts of (share of tokens sent to it) *
    (mean probability) (Fedus et al. 2021, "Switch Transformers", arXiv 2101.03961, equation 4), of which only the
    probability has a gradient.
    """
    return counts * (weights * (counts.shape[1] / max(length, 1) ** 2)).unsqueeze(1)


def inject_grad(probabilities: Tensor, grad: Tensor) -> Tensor:
    """Probabilities of any shape unchanged; the backward pass adds a gradient that broadcasts to their shape."""
    return _InjectGrad.apply(probabilities, grad.to(probabilities.dtype))  # type: ignore[no-untyped-call, no-any-return]


class _InjectGrad(Function):
    @staticmethod
    def forward(ctx: Any, probabilities: Tensor, added: Tensor) -> Tensor:
        ctx.save_for_backward(added)
        return probabilities.view_as(probabilities)  # a Function must not return its input itself

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (added,) = ctx.saved_tensors
        return grad + added, None


class Router(Linear):
    """The scores of the experts for each token. It is no `Linear` to adapters: PEFT has none for routers."""

    def split_dims(self) -> Mapping[str, tuple[int, int]]:
        """None: each rank scores all experts for its own tokens."""
        return {}


class SparseMoeBlock(RowSums):
    """
    The sum over a token's experts of probability * down(silu(gate(x)) * up(x)); each rank routes its own tokens.

    Modules and parameters carry the names of transformers 5's Qwen3MoeSparseMoeBlock: the router is `gate`.
    """

    def __init__(self, architecture: MoeConfig, kernels: ExpertKernels) -> None:
        super().__init__()
        self.gate = Router(architecture.hidden_size, architecture.num_experts, kernels)
        self.experts = Experts(architecture, kernels)
        self.architecture = architecture

    def forward(self, hidden: Tensor, weights: Tensor | None = None) -> Tensor:
        """
        Hidden states (rows, length, hidden_size), of the parameters' dtype, in and out; split tokens with `ranks`.

        With weights of tokens, float32 (rows, length), the backward pass adds gradients of the load-balancing loss.
        """
        chosen, probabilities = self._choose(hidden, weights)
        return self.experts(hidden, chosen, probabilities)  # type: ignore[no-any-return]

    def _choose(self, hidden: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """The experts of each token, int64, and their probabilities, at least float32; (..., choices) both."""
        logits = self.gate(hidden)
        all_probabilities = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        # Which experts are the best has no gradient; only their probabilities do.
        chosen = all_probabilities.detach().topk(self.architecture.num_experts_per_tok).indices
        if weights is not None and self.architecture.router_aux_loss_coef:
            coefficient = self.architecture.router_aux_loss_coef / self.architecture.moe_layers
            counts = self.row_counts(chosen, weights, self.architecture.num_experts)
            # Gradients are divided by the sum of all tokens' weights in the end, so a row counts by its part of that.
            grad = aux_loss_grad(counts, self.row_weights(weights) * coefficient, self.row_length(weights))
            all_probabilities = inject_grad(all_probabilities, self.of_tokens(grad, weights))
        probabilities = all_probabilities.gather(-1, chosen)
        if self.architecture.norm_topk_prob:
            probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        return chosen, probabilities


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
        Hidden states (..., hidden_size) in and out, through the experts `chosen` for each token, int64 (..., choices),
        each weighted by its probability, at least float32 of the same shape.
        """
        dispatcher = self.dispatcher or LocalExperts(kernels=self.kernels)
        tokens, choices, weights = (tensor.flatten(0, -2) for tensor in (hidden, chosen, probabilities))
        here = dispatcher.dispatch(tokens, choices, weights, self.num_experts)
        both = self.project("gate_up_proj", here.rows, here.ends)
        # `down_proj` is linear, so probabilities may be multiplied in before it, where that costs no pass over memory.
        mixed = self.kernels.swiglu_halves(both, here.scale)
        return here.combine(self.project("down_proj", mixed, here.ends)).view_as(hidden)

    def project(self, name: str, rows: Tensor, ends: Tensor) -> Tensor:
        """Rows (rows, inputs), sorted by expert, times a parameter (experts, outputs, inputs): (rows, outputs)."""
        return self.kernels.grouped_gemm(rows, getattr(self, name), ends, transposed=True)
