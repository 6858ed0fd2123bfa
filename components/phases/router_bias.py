"""
Balance of experts without a loss: a bias of each expert, which follows how many tokens it has had.

DeepSeek-AI 2024, "DeepSeek-V3", arXiv 2412.19437, section 2.1.2, after Wang et al. 2024, arXiv 2408.15664, algorithm 1.
"""

from collections import Counter
from collections.abc import Callable

import attrs
import torch
from torch import Tensor

from drawloom.components.ports.distributed import Device, Mesh
from drawloom.components.ports.experts import ExpertRouter, routers_of
from drawloom.components.ports.run import Step
from drawloom.components.ports.stages import Stages
from drawloom.graph import UserError, at_least, component, setting


@component(reads=("skip?",), changes=("weights",))
class RouterBias:
    """
    Moves the bias of each expert by `update_rate`: up if it had fewer tokens than the mean of its layer, down if more.

    The tokens are those of the whole step, over all microbatches and ranks, so that replicas keep the same biases. A
    skipped step changes none. The biases are persistent buffers of the model, which checkpoints and exports have.
    Adapters freeze the biases of the routers that they freeze; those of routers that they tune in full move.
    """

    stages: Stages
    mesh: Mesh
    device: Device
    update_rate: float = setting(
        default=1e-3, check=at_least(0), doc="what a bias changes by in a step; scores are from 0 to 1"
    )

    _routers: dict[str, ExpertRouter] = attrs.field(init=False, factory=dict)
    # the experts of each router that several pipeline ranks have, as layers outside of the circular pipeline
    _repeated: dict[str, int] = attrs.field(init=False, factory=dict)
    _observers: list[Callable[[Tensor, Tensor], None]] = attrs.field(init=False, factory=list)
    _tokens: Tensor = attrs.field(init=False, default=None)

    def open(self) -> None:
        """Count the tokens of routers with a bias that is not frozen; UserError if there is none on any rank."""
        found = {name: each for name, each in routers_of(self.stages).items() if _has_bias(each)}
        adapted = any(stage.adapters for stage in self.stages.local)
        self._routers = {name: each for name, each in found.items() if not adapted or _is_trained(each)}
        mine = {name: each.num_experts for name, each in self._routers.items()}
        gathered: list[tuple[int, dict[str, int]]] = self.mesh.pipeline_group.gather_json([len(found), mine])
        times = Counter(name for _, movable in gathered for name in movable)
        everywhere = {name: experts for _, movable in gathered for name, experts in movable.items()}
        self._repeated = {name: everywhere[name] for name in sorted(times) if times[name] > 1}
        if not everywhere:
            text = "no router of the model has a bias for phases.router_bias to change"
            remedy = 'take a model with biases, such as "model.dots1"'
            if any(biased for biased, _ in gathered):
                text = "the adapters freeze every router, and with it the bias that phases.router_bias would change"
                remedy = 'tune routers in full, by adapters.full_tuning with targets = ["mlp.gate"]'
            raise UserError(f"{text}; leave the phase out, or {remedy}", 2)
        experts = max(mine.values(), default=0)
        self._tokens = torch.zeros(len(self._routers), experts, dtype=torch.int64, device=self.device.device)
        for router, tokens in zip(self._routers.values(), self._tokens, strict=True):
            self._observers.append(_adding_to(tokens))
            router.observe(self._observers[-1])

    def close(self) -> None:
        """Count no more."""
        routers = [*self._routers.values()]
        while self._observers:
            routers[len(self._observers) - 1].ignore(self._observers.pop())

    def run_phase(self, step: Step) -> None:
        """Move the biases, and begin to count anew."""
        if self._repeated:
            self._sum_over_pipeline()
        if self._routers:
            # These ranks have the same routers, and see other tokens.
            self.mesh.data_group.sum(self._tokens)
            self.mesh.tensor_group.sum(self._tokens)
            step.apply_update(self._move)
            self._tokens.zero_()

    def _sum_over_pipeline(self) -> None:
        """Sum the tokens of routers that several pipeline ranks have; a rank without one adds zeros."""
        mine = dict(zip(self._routers, self._tokens, strict=True))
        rows = [mine.get(name, self._tokens.new_zeros(experts)) for name, experts in self._repeated.items()]
        total = torch.cat(rows)
        self.mesh.pipeline_group.sum(total)
        for row, summed in zip(rows, torch.split(total, [*self._repeated.values()]), strict=True):
            row.copy_(summed)

    def _move(self, skip: Tensor | None) -> None:
        """Change the biases; a flag `skip`, float32 () on the device, of 1 changes nothing."""
        # In whole numbers, so that equal loads are equal: experts * (mean - load).
        missing = self._tokens.sum(1, keepdim=True) - self._tokens.shape[1] * self._tokens
        change = missing.sign() * self.update_rate
        if skip is not None:
            change = change * (1 - skip)
        for router, each in zip(self._routers.values(), change, strict=True):
            if router.e_score_correction_bias is not None:
                router.e_score_correction_bias.add_(each)


def _has_bias(router: ExpertRouter) -> bool:
    return router.e_score_correction_bias is not None


def _is_trained(router: ExpertRouter) -> bool:
    """Whether something of a router is: adapters for PEFT hold the whole of it then, and else nothing."""
    return any(each.requires_grad for each in router.parameters())


def _adding_to(total: Tensor) -> Callable[[Tensor, Tensor], None]:
    def add(tokens: Tensor, scores: Tensor) -> None:
        total.add_(tokens)

    return add
