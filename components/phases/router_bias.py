"""
Expert load balance without an auxiliary loss: every expert has a bias that follows its token count.

DeepSeek-AI 2024, "DeepSeek-V3", arXiv 2412.19437, section 2.1.2, after Wang et al. 2024, arXiv 2408.15664, algorithm 1.
"""

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from drawloom import UserError, at_least, component, internal, setting
from drawloom.ports import Device, ExpertRouter, Mesh, Stages, Step, find_routers


@component(reads=("skip?",), changes=("weights",))
class RouterBias:
    """
    Update of expert biases by `update_rate`: up for an expert with fewer tokens than its layer's mean, down with more.

    Tokens are counted over all microbatches and ranks in a step, so replicas keep the same biases. A skipped step
    changes no bias. The biases are persistent buffers of the model; checkpoints and exports include them. Under
    adapters only the biases of fully tuned routers move.
    """

    stages: Stages
    mesh: Mesh
    device: Device
    update_rate: float = setting(
        "bias change in one step, relative to scores from 0 to 1", default=1e-3, check=at_least(0)
    )

    _routers: dict[str, ExpertRouter] = internal(factory=dict)
    # number of experts by router, for routers on several pipeline ranks, such as layers outside a circular pipeline
    _repeated: dict[str, int] = internal(factory=dict)
    _observers: list[Callable[[Tensor, Tensor], None]] = internal(factory=list)
    _tokens: Tensor = internal(None)

    def open(self) -> None:
        """Start to count tokens in routers with a movable bias. Raises UserError if no rank has one."""
        biased = {
            name: router
            for name, router in find_routers(self.stages).items()
            if router.e_score_correction_bias is not None
        }
        is_adapted = any(stage.adapters for stage in self.stages.local)
        self._routers = {
            name: router
            for name, router in biased.items()
            if not is_adapted or any(parameter.requires_grad for parameter in router.parameters())
        }
        local = {name: router.num_experts for name, router in self._routers.items()}
        gathered: list[tuple[int, dict[str, int]]] = self.mesh.pipeline_group.gather_json([len(biased), local])
        ranks = Counter(name for _, movable in gathered for name in movable)
        all_experts = {name: experts for _, movable in gathered for name, experts in movable.items()}
        self._repeated = {name: all_experts[name] for name in sorted(ranks) if ranks[name] > 1}
        if not all_experts:
            text = "no router of the model has a bias for phases.router_bias to change"
            remedy = 'take a model with biases, such as "model.dots1"'
            if any(count for count, _ in gathered):
                text = "the adapters freeze every router, and with it the bias that phases.router_bias would change"
                remedy = 'tune routers in full, by adapters.full_tuning with targets = ["mlp.gate"]'
            raise UserError(f"{text}; leave the phase out, or {remedy}", 2)
        experts = max(local.values(), default=0)
        self._tokens = torch.zeros(len(self._routers), experts, dtype=torch.int64, device=self.device.device)
        for router, tokens in zip(self._routers.values(), self._tokens, strict=True):
            self._observers.append(_make_token_counter(tokens))
            router.add_routing_observer(self._observers[-1])

    def close(self) -> None:
        """Stop counting tokens."""
        routers = [*self._routers.values()]
        while self._observers:
            routers[len(self._observers) - 1].remove_routing_observer(self._observers.pop())

    def forget_passes(self) -> None:
        if self._routers:
            self._tokens.zero_()

    def run_phase(self, step: Step) -> None:
        """Move the biases, and reset the counts."""
        if self._repeated:
            # Sum the token counts of routers on several pipeline ranks; a rank without the router adds zeros
            local = dict(zip(self._routers, self._tokens, strict=True))
            rows = [local.get(name, self._tokens.new_zeros(experts)) for name, experts in self._repeated.items()]
            total = torch.cat(rows)
            self.mesh.pipeline_group.sum(total)
            for row, summed in zip(rows, torch.split(total, [*self._repeated.values()]), strict=True):
                row.copy_(summed)
        if self._routers:
            # Ranks of these groups have the same routers, and different tokens.
            self.mesh.data_group.sum(self._tokens)
            self.mesh.tensor_group.sum(self._tokens)
            step.apply_update_unless_skipped(self._adjust_biases_by_load)
            self._tokens.zero_()

    def _adjust_biases_by_load(self, skip: Tensor | None) -> None:
        """Change the biases, unless the flag `skip`, float32 () on the device, is 1."""
        # Integers, so that equal loads compare as equal: experts * (mean - load).
        missing = self._tokens.sum(1, keepdim=True) - self._tokens.shape[1] * self._tokens
        change = missing.sign() * self.update_rate
        if skip is not None:
            change = change * (1 - skip)
        for router, row in zip(self._routers.values(), change, strict=True):
            if router.e_score_correction_bias is not None:
                router.e_score_correction_bias.add_(row)


def _make_token_counter(total: Tensor) -> Callable[[Tensor, Tensor], None]:
    """Return a router hook for adding token counts to `total`."""

    def add(tokens: Tensor, scores: Tensor) -> None:
        total.add_(tokens)

    return add
