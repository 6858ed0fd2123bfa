"""Experts beside a feed-forward network, both between norms (Gemma 4)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from drawloom.components.model.decoder.config import DecoderConfig
from drawloom.components.model.decoder.expert_specs import NormedExpertSpec, NormedRouting
from drawloom.components.model.decoder.experts import SparseMoeBlock
from drawloom.components.model.decoder.router import ExpertChoices, Router
from drawloom.components.model.layers import RMSNorm
from drawloom.ports import SCALE_ROLE, Kernels, Role


class NormedRouter(Router):
    """Router that norms its inputs, multiplies their channels by `scale`, and experts' weights by one number each."""

    routing: NormedRouting

    def __init__(self, hidden_size: int, num_experts: int, *arguments: Any, **named: Any) -> None:
        super().__init__(hidden_size, num_experts, *arguments, **named)
        self.scale = nn.Parameter(torch.ones(hidden_size))
        self.per_expert_scale = nn.Parameter(torch.ones(num_experts))

    def forward(  # type: ignore[override]
        self, hidden: Tensor, weights: Tensor | None = None, padding: Tensor | None = None
    ) -> ExpertChoices:
        """Choose experts for hidden states (..., hidden_size); see `Router`."""
        normed = self.kernels.rms_norm(hidden, self.scale * hidden.shape[-1] ** -0.5, self.routing.eps)
        chosen, best = super().forward(normed, weights, padding)
        return ExpertChoices(chosen, best * self.per_expert_scale.to(best.dtype)[chosen])

    def parameter_roles(self) -> Mapping[str, Role]:
        return {**super().parameter_roles(), "scale": SCALE_ROLE, "per_expert_scale": SCALE_ROLE}


class NormedMoeBlock(SparseMoeBlock):
    """Feed-forward network plus experts, both with norms before and after."""

    router_class = NormedRouter
    pre_feedforward_layernorm: RMSNorm
    pre_feedforward_layernorm_2: RMSNorm
    post_feedforward_layernorm_1: RMSNorm
    post_feedforward_layernorm_2: RMSNorm

    def __init__(self, architecture: DecoderConfig, spec: NormedExpertSpec, kernels: Kernels) -> None:
        super().__init__(architecture, spec, kernels)
        for order, suffixes in (("pre", ("", "_2")), ("post", ("_1", "_2"))):
            for suffix in suffixes:
                norm = RMSNorm(architecture.hidden_size, architecture.rms_norm_eps, kernels)
                self.add_module(f"{order}_feedforward_layernorm{suffix}", norm)

    def apply_shared_experts(self, hidden: Tensor) -> Tensor:
        shared = super().apply_shared_experts(self.pre_feedforward_layernorm(hidden))
        return self.post_feedforward_layernorm_1(shared)  # type: ignore[no-any-return]

    def apply_experts(self, hidden: Tensor, choices: Tensor, scale: Tensor) -> Tensor:
        mixed = super().apply_experts(self.pre_feedforward_layernorm_2(hidden), choices, scale)
        return self.post_feedforward_layernorm_2(mixed)  # type: ignore[no-any-return]
