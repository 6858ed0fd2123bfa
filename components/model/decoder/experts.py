"""
A router, and the experts that it sends tokens to.

Nemotron 3 has networks without a gate, and experts between projections to fewer channels.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from drawloom.components.experts.local import LocalExperts
from drawloom.components.model.decoder.config import DecoderConfig
from drawloom.components.model.decoder.expert_specs import ExpertSpec
from drawloom.components.model.decoder.mlp import GatedMlp
from drawloom.components.model.decoder.router import Router
from drawloom.components.model.decoder.specs import LayerContext, MlpSpec
from drawloom.components.model.layers import Linear
from drawloom.components.parallel.split_experts import ExpertParallel
from drawloom.ports import Dispatcher, Kernels, Mesh, Role


class SharedGate(Linear):
    """Linear layer with one output."""


class SparseMoeBlock(nn.Module):
    """
    Sum over a token's experts of probability * down(silu(gate(x)) * up(x)); each rank routes its own tokens.

    With `shared_expert_width`, the output of a feed-forward network that all tokens visit is added (Dai et al. 2024,
    DeepSeekMoE, arXiv 2401.06066), with `shared_gate` times the sigmoid of a number by token. Modules and parameters
    carry the names of transformers 5.
    """

    router_class: ClassVar[type[Router]] = Router

    def __init__(self, architecture: DecoderConfig, spec: ExpertSpec, kernels: Kernels) -> None:
        super().__init__()
        self.spec = spec
        self.add_module(spec.router, self.router_class(architecture.hidden_size, spec, kernels))
        self.experts = Experts(spec.latent_width or architecture.hidden_size, spec, kernels)
        if spec.shared_expert_width:
            mlp = MlpSpec(width=spec.shared_expert_width, activation=spec.activation.in_mlp)
            self.add_module(spec.shared, mlp.build(architecture, kernels))
        if spec.shared_gate:
            self.shared_expert_gate = SharedGate(architecture.hidden_size, 1, kernels, style="whole")

    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor:
        """
        Map hidden states (rows, length, hidden_size), or (tokens, hidden_size) if ranks split them.

        With weights of tokens in the context, the backward pass adds gradients of the router's losses.
        """
        chosen, probabilities = self.get_submodule(self.spec.router)(hidden, context.weights, context.padding)
        choices, scale = (tensor.flatten(0, -2) for tensor in (chosen, probabilities))
        mixed = self.apply_experts(hidden, choices, scale).view_as(hidden)
        return mixed + self.apply_shared_experts(hidden) if self.spec.shared_expert_width else mixed

    def apply_shared_experts(self, hidden: Tensor) -> Tensor:
        """Return the output for all tokens' network, given hidden states (..., hidden_size)."""
        shared: Tensor = self.get_submodule(self.spec.shared)(hidden)
        return self.shared_expert_gate(hidden).sigmoid() * shared if self.spec.shared_gate else shared

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
        shapes = (spec.activation.factors * spec.width, width), (width, spec.width)
        for name, shape in zip(self.matrices, shapes, strict=True):
            self.register_parameter(name, nn.Parameter(torch.empty(spec.experts, *shape)))
        for name, shape in zip(self.matrices, shapes, strict=True) if spec.biases else ():
            self.register_parameter(f"{name}_bias", nn.Parameter(torch.empty(spec.experts, shape[0])))
        self.num_experts = spec.experts
        self.kernels = kernels

    @property
    def matrices(self) -> tuple[str, str]:
        """The names of the parameters before and after the activation, (experts, outputs, inputs)."""
        return self.spec.activation.parameter, "down_proj"

    def create_dispatcher(self, mesh: Mesh) -> Dispatcher:
        from drawloom.components.experts.all_to_all import AllToAllExperts

        return AllToAllExperts(kernels=self.kernels, mesh=mesh)

    def parameter_roles(self) -> Mapping[str, Role]:
        visited, (first, last) = self.spec.choices / self.spec.experts, self.matrices
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
        if self.spec.biases:
            products = self.kernels.add_expert_bias(products, self.get_parameter(f"{first}_bias"), ends)
        # `down_proj` is linear, so probabilities may be multiplied in before it, where that costs no pass over memory.
        mixed = self.spec.activation.apply(self.kernels, products, scale)
        outputs = self.project(last, mixed, ends)
        if self.spec.biases:
            outputs = self.kernels.add_expert_bias(outputs, self.get_parameter(f"{last}_bias"), ends, scale)
        return outputs

    def project(self, name: str, rows: Tensor, ends: Tensor) -> Tensor:
        """Multiply rows (rows, inputs), sorted by expert, by a parameter (experts, outputs, inputs)."""
        return self.multiply_by_weight(name, rows, ends)

    def multiply_by_weight(self, name: str, rows: Tensor, ends: Tensor) -> Tensor:
        """Compute `project` without adapters; features replace this method."""
        return self.kernels.grouped_gemm(rows, getattr(self, name), ends, transposed=True)


class SquaredReluMlp(GatedMlp):
    """down_proj(relu(up_proj(x)) ** 2)."""

    inner_projections = ("up_proj",)

    def compute_partial_outputs(self, hidden: Tensor) -> Tensor:
        return self.down_proj(self.up_proj(hidden).relu().square())  # type: ignore[no-any-return]


class LatentMoeBlock(SparseMoeBlock):
    """Experts whose inputs and outputs have fewer channels; the shared experts have all."""

    def __init__(self, architecture: DecoderConfig, spec: ExpertSpec, kernels: Kernels) -> None:
        super().__init__(architecture, spec, kernels)
        outer = architecture.hidden_size
        latent = spec.latent_width or outer
        self.fc1_latent_proj = Linear(outer, latent, kernels, style="whole")
        self.fc2_latent_proj = Linear(latent, outer, kernels, style="whole", is_residual=True)

    def apply_experts(self, hidden: Tensor, choices: Tensor, scale: Tensor) -> Tensor:
        return self.fc2_latent_proj(super().apply_experts(self.fc1_latent_proj(hidden), choices, scale))  # type: ignore[no-any-return]
