"""
A router, and the experts that it sends tokens to.

The router chooses a token's experts, and its losses keep experts in balance. Nemotron 3 has experts between
projections to fewer channels.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function

from drawloom.components.experts.local import LocalExperts
from drawloom.components.model.decoder.branch_specs import ExpertSpec
from drawloom.components.model.decoder.config import DecoderConfig
from drawloom.components.model.decoder.specs import LayerContext, MlpSpec
from drawloom.components.model.layers import Linear, at_least_float32
from drawloom.components.parallel.row_sums import RowSums
from drawloom.components.parallel.split_experts import ExpertParallel
from drawloom.components.parallel.tensor_ranks import SplitDim
from drawloom.kernels.recompute.marks import is_recomputing
from drawloom.ports import Dispatcher, ExpertRouter, Kernels, Mesh, ObserveRouting, Role


def attach_loss_gradient(tensor: Tensor, loss: Tensor) -> Tensor:
    """
    Return the tensor (any shape) unchanged. The backward pass through it also computes the gradients of `loss` ().

    So a loss inside a model needs no path to the model's output, which may be on another rank.
    """
    return _AttachLoss.apply(tensor, loss)  # type: ignore[no-untyped-call, no-any-return]


class _AttachLoss(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor) -> Tensor:
        """A view of the tensor, with any shape and dtype; the loss has no dimensions."""
        ctx.save_for_backward(loss)
        return tensor.view_as(tensor)  # a Function must not return its input itself

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return grad, torch.ones_like(loss)


def compute_aux_loss_grad(counts: Tensor, weights: Tensor, choices: int) -> Tensor:
    """
    Return the gradients of the rows' load-balancing losses with respect to a token's probabilities, (rows, experts).

    `counts`: how many choices by a row's tokens fell on an expert, (rows, experts), without padding; `weights`: the
    weights of the rows' losses, (rows,); `choices`: a token's choices. A row has the loss experts * sum over experts of
    (share of tokens sent to it) * (mean probability), and only the probability has a gradient. Fedus et al. 2021,
    "Switch Transformers", arXiv 2101.03961, equation 4; by rows, DeepSeek-AI 2024, arXiv 2412.19437, equation 17. As in
    transformers, shares add up to a token's choices.
    """
    tokens = (counts.sum(1, dtype=torch.float64) / choices).clamp(min=1)
    return counts * (weights * counts.shape[1] / tokens.square()).unsqueeze(1)


def sum_weighted_z_loss(logits: Tensor, weights: Tensor) -> Tensor:
    """
    Return the sum over tokens of weight * log(sum over experts of exp(logit)) ** 2; as a loss it keeps logits small.

    `logits`: (..., experts); `weights`: (...). Zoph et al. 2022, "ST-MoE", arXiv 2202.08906, equation
    5.
    """
    return (logits.logsumexp(-1).square() * weights.to(logits.dtype)).sum()


class ExpertChoices(NamedTuple):
    """Chosen experts, int64 (..., choices), and their weights, at least float32 (..., choices)."""

    experts: Tensor
    weights: Tensor


class Router(Linear, RowSums, ExpertRouter):
    """
    Router that scores the experts for every token and chooses some. It is not a `Linear` to adapters: PEFT has none for
    routers. Every rank has the whole router, and routes its own tokens.

    `e_score_correction_bias`, float32 (experts,), is the balancing bias; it has no gradient, since the choice it
    decides has none. `aux_loss_coef` and `z_loss_coef` are for this layer's losses.
    """

    e_score_correction_bias: Tensor | None

    def __init__(self, hidden_size: int, spec: ExpertSpec, kernels: Kernels) -> None:
        super().__init__(hidden_size, spec.num_experts, kernels, spec.router_bias)
        self.spec = spec
        self.num_experts = spec.num_experts
        self.aux_loss_coef, self.z_loss_coef = spec.aux_loss_coef, spec.z_loss_coef
        self._observers: list[ObserveRouting] = []
        self.register_buffer("e_score_correction_bias", torch.zeros(spec.num_experts) if spec.balancing_bias else None)

    def reset_parameters(self) -> None:
        """Fill the bias with zeros; the model's `initialize_parameter` or nn.Linear fills the weight."""
        if (bias := self._buffers.get("e_score_correction_bias")) is None:  # nn.Linear calls this before it is there
            super().reset_parameters()
        else:
            nn.init.zeros_(bias)

    def split_dims(self) -> Mapping[str, SplitDim]:
        """Return {}: every rank has the whole router."""
        return {}

    def add_routing_observer(self, observer: ObserveRouting) -> None:
        """Call `observer` in every forward pass of training from now on, once for a microbatch."""
        self._observers.append(observer)

    def remove_routing_observer(self, observer: ObserveRouting) -> None:
        """Stop calling `observer`."""
        self._observers.remove(observer)

    def forward(  # type: ignore[override]
        self, hidden: Tensor, weights: Tensor | None = None, padding: Tensor | None = None
    ) -> ExpertChoices:
        """
        Choose experts for all tokens.

        hidden is (rows, length, hidden_size), the results (rows, length, choices); if several `ranks` split the tokens,
        (tokens, hidden_size) and (tokens, choices). Given token weights, float32 (rows, length), the backward pass adds
        the gradients of the auxiliary and z losses as weighted sums, since after a step's microbatches all gradients
        are divided by the total token weight. Tokens in `padding`, bool (rows, length), are routed and count in neither
        a loss nor an observer.
        """
        is_token = None if padding is None else self.select_own_token_weights((~padding).float())
        wide = at_least_float32(self.weight)
        if self.spec.wide_logits:
            logits = self.kernels.linear(hidden.to(wide), self.weight.to(wide))
        else:
            logits = super().forward(hidden)
        if weights is not None and self.z_loss_coef:
            logits = logits.to(wide)
            token_coefs = self.select_own_token_weights(weights) * self.z_loss_coef
            logits = attach_loss_gradient(logits, sum_weighted_z_loss(logits, token_coefs))
        scores = logits.softmax(-1, wide) if self.spec.scoring_func == "softmax" else logits.to(wide).sigmoid()
        # Which experts are the best has no gradient; only their scores do.
        chosen = self.choose_experts(scores.detach())
        if weights is not None and self.aux_loss_coef:
            scores = attach_loss_gradient(scores, self._compute_aux_loss_surrogate(scores, chosen, weights, is_token))
        if weights is not None and self._observers:
            self._report_token_counts(
                self.remove_padding(chosen, weights), self.remove_padding(scores, weights), is_token
            )
        best = scores.gather(-1, chosen)
        if self.spec.norm_topk_prob:
            best = self._divide_by_sum(best)
        factor = self.spec.routed_scaling_factor
        return ExpertChoices(chosen, best if factor == 1.0 else best * factor)

    def _compute_aux_loss_surrogate(
        self, scores: Tensor, chosen: Tensor, weights: Tensor, is_token: Tensor | None
    ) -> Tensor:
        """
        Return a scalar, linear in the probabilities, whose gradients equal the rows' load-balancing losses' gradients.
        """
        counts = self.count_row_choices_over_ranks(chosen, weights, self.num_experts, is_token)
        grad = compute_aux_loss_grad(counts, self.sum_row_weights(weights) * self.aux_loss_coef, chosen.shape[-1])
        grad = self.repeat_by_token(grad.to(scores.dtype), weights)
        if is_token is not None:
            grad = grad * is_token.unsqueeze(-1)
        return (grad * self._normalise_unless_softmax(scores)).sum()

    def choose_experts(self, scores: Tensor) -> Tensor:
        """Choose the experts with the best scores (..., experts) plus bias in the best groups: int64 (..., choices)."""
        if self.e_score_correction_bias is not None:
            scores = scores + self.e_score_correction_bias
        if (groups := self.spec.n_group) > 1:
            grouped = scores.view(*scores.shape[:-1], groups, self.num_experts // groups)
            best = grouped.topk(self.spec.best_in_group).values.sum(-1).topk(self.spec.topk_group).indices
            other = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, False)
            scores = grouped.masked_fill(other.unsqueeze(-1), -torch.inf).flatten(-2)
        return scores.topk(self.spec.num_experts_per_tok).indices

    def _normalise_unless_softmax(self, scores: Tensor) -> Tensor:
        """Divide scores (..., experts) by their sum, except softmax scores, whose sum is already 1."""
        return scores if self.spec.scoring_func == "softmax" else self._divide_by_sum(scores)

    def _divide_by_sum(self, scores: Tensor) -> Tensor:
        """Divide scores by their sum over the last dimension."""
        total = scores.sum(-1, keepdim=True)
        return scores / (total if self.spec.scoring_func == "softmax" else total + 1e-20)  # sigmoids may all be 0

    def _report_token_counts(self, chosen: Tensor, scores: Tensor, is_token: Tensor | None) -> None:
        """
        Call the observers with token counts by expert and the probabilities; only in training, not in recomputation.
        """
        # Evaluations have no gradients; what is computed again was counted before.
        if torch.is_grad_enabled() and not is_recomputing():
            scores, counted = self._normalise_unless_softmax(scores.detach()), torch.ones_like(chosen)
            if is_token is not None:
                own = is_token.flatten()[: len(chosen)].unsqueeze(1)
                scores, counted = scores * own, counted * own.to(chosen.dtype)
            tokens = counted.new_zeros(self.num_experts).scatter_add_(0, chosen.flatten(), counted.flatten())
            for observer in self._observers:
                observer(tokens, scores)


class SharedGate(Linear):
    """Linear layer with one output."""


class SparseMoeBlock(nn.Module):
    """
    Sum over a token's experts of probability * down(silu(gate(x)) * up(x)); each rank routes its own tokens.

    With `shared_expert_width`, the output of a feed-forward network that all tokens visit is added (Dai et al. 2024,
    DeepSeekMoE, arXiv 2401.06066), with `shared_expert_gate` times the sigmoid of a number by token. Modules and
    parameters carry the names of transformers 5; the spec names the router and the shared experts. With
    `moe_latent_size`, `LatentMoeBlock` projects tokens to the experts' channels and back.
    """

    router_class: ClassVar[type[Router]] = Router

    def __init__(self, architecture: DecoderConfig, spec: ExpertSpec, kernels: Kernels) -> None:
        super().__init__()
        self.spec = spec
        self.add_module(spec.router_name, self.router_class(architecture.hidden_size, spec, kernels))
        self.experts = Experts(spec.moe_latent_size or architecture.hidden_size, spec, kernels)
        if spec.shared_expert_width:
            mlp = MlpSpec(width=spec.shared_expert_width, activation=spec.activation)
            self.add_module(spec.shared_name, mlp.build(architecture, kernels))
        if spec.shared_expert_gate:
            self.shared_expert_gate = SharedGate(architecture.hidden_size, 1, kernels, style="whole")

    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor:
        """
        Map hidden states (rows, length, hidden_size), or (tokens, hidden_size) if ranks split them.

        With weights of tokens in the context, the backward pass adds gradients of the router's losses.
        """
        chosen, probabilities = self.get_submodule(self.spec.router_name)(hidden, context.weights, context.padding)
        choices, scale = (tensor.flatten(0, -2) for tensor in (chosen, probabilities))
        mixed = self.apply_experts(hidden, choices, scale).view_as(hidden)
        return mixed + self.apply_shared_experts(hidden) if self.spec.shared_expert_width else mixed

    def apply_shared_experts(self, hidden: Tensor) -> Tensor:
        """Return the output for all tokens' network, given hidden states (..., hidden_size)."""
        shared: Tensor = self.get_submodule(self.spec.shared_name)(hidden)
        return self.shared_expert_gate(hidden).sigmoid() * shared if self.spec.shared_expert_gate else shared

    def apply_experts(self, hidden: Tensor, choices: Tensor, scale: Tensor) -> Tensor:
        """Return the weighted sums of the experts' outputs, (tokens, hidden_size); see `Experts`."""
        mixed: Tensor = self.experts(hidden, choices, scale)
        return mixed


class Experts(ExpertParallel):
    """
    Experts of a layer: `gate_up_proj` (experts, 2 * inner width, hidden_size), whose first half is the gate's, and
    `down_proj` (experts, hidden_size, inner width). Activations without a gate have `up_proj` (experts, inner width,
    hidden_size) instead. Expert-parallel ranks partition the experts.
    """

    gate_up_proj: Tensor
    down_proj: Tensor

    def __init__(self, width: int, spec: ExpertSpec, kernels: Kernels) -> None:
        super().__init__()
        self.spec = spec
        shapes = (len(spec.activation.inner_projections) * spec.width, width), (width, spec.width)
        for name, shape in zip(self.matrices, shapes, strict=True):
            self.register_parameter(name, nn.Parameter(torch.empty(spec.num_experts, *shape)))
        for name, shape in zip(self.matrices, shapes, strict=True) if spec.expert_biases else ():
            self.register_parameter(f"{name}_bias", nn.Parameter(torch.empty(spec.num_experts, shape[0])))
        self.num_experts = spec.num_experts
        self.kernels = kernels

    @property
    def matrices(self) -> tuple[str, str]:
        """The names of the parameters before and after the activation, (experts, outputs, inputs)."""
        return self.spec.activation.expert_matrix, "down_proj"

    def create_dispatcher(self, mesh: Mesh) -> Dispatcher:
        from drawloom.components.experts.all_to_all import AllToAllExperts

        return AllToAllExperts(kernels=self.kernels, mesh=mesh)

    def parameter_roles(self) -> Mapping[str, Role]:
        visited, (first, last) = self.spec.num_experts_per_tok / self.spec.num_experts, self.matrices
        return {
            first: Role(True, "normal", visited),
            last: Role(True, "normal", visited, is_residual=True),
        }

    def forward(self, hidden: Tensor, chosen: Tensor, probabilities: Tensor) -> Tensor:
        """
        Apply every token's experts `chosen`, int64 (tokens, choices), to hidden states (..., hidden_size).

        Outputs are weighted by `probabilities`, at least float32 (tokens, choices), and summed by token: (tokens,
        hidden_size).
        """
        dispatcher = self.dispatcher or LocalExperts(kernels=self.kernels)
        here = dispatcher.dispatch(hidden.flatten(0, -2), chosen, probabilities, self.num_experts)
        return here.combine(self.apply_to_rows(here.rows, here.scale, here.ends))

    def apply_to_rows(self, rows: Tensor, scale: Tensor, ends: Tensor) -> Tensor:
        """Apply experts to their rows (rows, hidden_size), which end at `ends`, and multiply by scale (rows,)."""
        first, last = self.matrices
        products = self.project(first, rows, ends)
        if self.spec.expert_biases:
            products = self.kernels.add_expert_bias(products, self.get_parameter(f"{first}_bias"), ends)
        # `down_proj` is linear, so probabilities may be multiplied in before it, where that costs no pass over memory.
        mixed = self.spec.activation.apply_and_scale(self.kernels, products, scale)
        outputs = self.project(last, mixed, ends)
        if self.spec.expert_biases:
            outputs = self.kernels.add_expert_bias(outputs, self.get_parameter(f"{last}_bias"), ends, scale)
        return outputs

    def project(self, name: str, rows: Tensor, ends: Tensor) -> Tensor:
        """Multiply rows (rows, inputs), sorted by expert, by a parameter (experts, outputs, inputs)."""
        return self.multiply_by_weight(name, rows, ends)

    def multiply_by_weight(self, name: str, rows: Tensor, ends: Tensor) -> Tensor:
        """Compute `project` without adapters; features replace this method."""
        return self.kernels.grouped_gemm(rows, getattr(self, name), ends, transposed=True)


class LatentMoeBlock(SparseMoeBlock):
    """Experts whose inputs and outputs have fewer channels; the shared experts have all."""

    def __init__(self, architecture: DecoderConfig, spec: ExpertSpec, kernels: Kernels) -> None:
        super().__init__(architecture, spec, kernels)
        outer = architecture.hidden_size
        latent = spec.moe_latent_size or outer
        self.fc1_latent_proj = Linear(outer, latent, kernels, style="whole")
        self.fc2_latent_proj = Linear(latent, outer, kernels, style="whole", is_residual=True)

    def apply_experts(self, hidden: Tensor, choices: Tensor, scale: Tensor) -> Tensor:
        return self.fc2_latent_proj(super().apply_experts(self.fc1_latent_proj(hidden), choices, scale))  # type: ignore[no-any-return]
