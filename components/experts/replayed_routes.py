"""
Routes of a sampler, replayed by the learning pass.

Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers", arXiv 2510.11370
(rollout routing replay, R3): the router's probabilities are computed again, and have gradients, for the experts that
the sampler chose.
"""

import re
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from drawloom import NodeView, Problem, UserError, component, internal
from drawloom.components.metrics.pass_sums import PassSums
from drawloom.ports import (
    ONE_STEP_ROLLOUT,
    OPS,
    Action,
    ExpertModel,
    KeyValueCache,
    MakesRows,
    MetricTotals,
    MetricValues,
    Operation,
    PassFeature,
    PassRun,
    PolicyBatch,
    Rollouts,
    Stages,
    Step,
    find_routers,
    put_class_back,
    put_class_before,
)

SAMPLERS = ("rollouts.stages", "rollouts.server", "rollouts.turns")
"""Samplers with known routes; conversations have their turns' routes."""


class ReplayingRouter:
    """Router methods whose choices a `ReplayedRoutes` records or replaces, to be put before its class."""

    replay: "ReplayedRoutes"
    path: str

    def choose_experts(self, scores: Tensor) -> Tensor:
        """Return the sampler's experts, or the router's own, int64 (..., choices), by scores (..., experts)."""
        return self.replay.record_or_replace(self, super().choose_experts(scores))  # type: ignore[misc]


@component(reads=("rollouts", "batches"))
class ReplayedRoutes(PassFeature, PassSums):
    """
    Replayed routes for reinforcement learning: tokens visit the experts that the sampler chose for them.

    Sampler and learning pass round differently, and a router's near ties then send a token to other experts. The node
    is a phase after the rollout, and a metric, `route_difference`: the share of choices, over tokens and layers, that
    would have differed. Probabilities are computed again, and have gradients. Where both choose the same experts, in
    any order, nothing changes by a bit. The sampler, also of a conversation's turns, is `rollouts.stages`, whose
    rollouts are for one step, or a server with routes in its answers.
    """

    excludes: ClassVar[Mapping[str, str]] = {
        "pipeline.captured": "CUDA graphs repeat a pass without its routers' choices",
        "stages.compiled": "compiled layers do not call the replay",
    }

    stages: Stages
    _routers: dict[str, Any] = internal(factory=dict)
    _cache: KeyValueCache | None = internal(None)
    _recorded: dict[str, list[Tensor]] = internal(factory=dict)
    # by microbatch and router: experts counted from 1, or 0 for the router's own choice; int16 (rows, length, choices)
    _routes: list[dict[str, Tensor]] = internal(factory=list)
    _recorded_shape: torch.Size | None = internal(None)  # of a pass by the sampler
    _replayed: dict[str, Tensor] = internal(factory=dict)  # in a pass over a microbatch
    _counts_choices: bool = internal(False)

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Report a model without experts, and rollouts whose routes are not recorded, or are for several steps."""
        stages = node.neighbour("stages")
        model = stages.neighbour("model") if stages else None
        if model and model.implements(ExpertModel) and not model.component.expert_count(model):  # type: ignore[attr-defined]
            yield node.problem("use", f"[{model.name}] has no experts to choose", f"remove [{node.name}]")
        nodes = [NodeView(other, node.nodes) for other in node.nodes.values()]
        # The stages keep the last rollout's routes; a server returns each completion's routes with it.
        keeps_last_rollout = any(other.use == "rollouts.stages" for other in nodes)
        for other in nodes:
            if other.implements(Rollouts) and other.use not in SAMPLERS:
                text = f"[{node.name}] replays routes, and {other.use} returns none"
                yield other.problem("use", text, f'write use = "rollouts.stages", or remove [{node.name}]')
            elif other.implements(Rollouts) and other.settings.get("exact"):
                text = f"exact rollouts have the routes of the learning pass, so that [{node.name}] has no effect"
                yield other.problem("exact", text, f"write exact = false, or remove [{node.name}]")
            for key, largest in ONE_STEP_ROLLOUT.items() if keeps_last_rollout and other.implements(MakesRows) else ():
                if other.settings.get(key, largest) > largest:
                    text = f"[{node.name}] keeps the routes of one step's rollout"
                    yield other.problem(key, text, f"write {key} = {largest}, or remove [{node.name}]")

    def open(self) -> None:
        """Observe this rank's routers."""
        self.allocate_sums(2)  # other choices, and all
        for path, router in find_routers(self.stages).items():
            module: Any = router
            put_class_before(module, ReplayingRouter)
            module.replay, module.path = self, path
            self._routers[path] = module

    def close(self) -> None:
        """Leave the routers as they were."""
        while self._routers:
            put_class_back(self._routers.popitem()[1])

    def start_run(self, run: PassRun, operations: Mapping[str, Operation]) -> Mapping[str, Operation]:
        """Record the routes of passes with a cache, and replay them in training."""
        shared: Any = run.microbatches[0].shared
        if run.kind == "inference" and shared.cache is not None:
            if shared.cache is not self._cache:
                self._cache, self._recorded = shared.cache, {path: [] for path in self._routers}
            self._recorded_shape = shared.positions.shape
        elif run.kind == "training" and self._routes:
            batches: list[Any] = [inputs.batch for inputs in run.microbatches]
            routes = [*map(_pack_routes, batches, self._routes)]
            return {
                op: partial(self._run_with_routes, operation, routes) if op in OPS else operation
                for op, operation in operations.items()
            }
        return operations

    def end_run(self, run: PassRun) -> None:
        self._recorded_shape = None

    def _run_with_routes(self, operation: Operation, routes: list[dict[str, Tensor]], action: Action) -> None:
        """Run a microbatch's pass with its routes by router; a backward pass may compute layers again."""
        self._replayed, self._counts_choices = routes[action.microbatch], action.op == "F"
        operation(action)
        self._replayed = {}

    def record_or_replace(self, router: Any, chosen: Tensor) -> Tensor:
        """Return the experts to visit, and record the `chosen` ones in a pass by the sampler; int64 (..., choices)."""
        if self._recorded_shape is not None:
            whole = router.ranks.gather_tokens_without_grad_sum(chosen, self._recorded_shape)
            self._recorded[router.path].append(whole.to(torch.int16) + 1)
        if (routes := self._replayed.get(router.path)) is None:
            return chosen
        if routes.shape[-1] != chosen.shape[-1]:
            raise UserError(
                f"the server's routes have {routes.shape[-1]} experts for a token, and {router.path} chooses "
                f"{chosen.shape[-1]}; serve the run's model"
            )
        own = [router.select_own_token_weights(choice) for choice in routes.unbind(-1)]
        sampled = torch.stack(own, -1).long() - 1
        is_sampled = sampled[..., 0] >= 0
        differs = is_sampled & (sampled.sort(-1).values != chosen.sort(-1).values).any(-1)
        if self._counts_choices:
            self._sums += torch.stack([differs.sum(), is_sampled.sum()])
        return torch.where(differs.unsqueeze(-1), sampled, chosen)

    def run_phase(self, step: Step) -> None:
        """Divide the routes of the step's rollout into microbatches. Raises UserError if there are none."""
        completions = [part.completions for part in step.state["rollouts"]]
        whole = {path: torch.cat(parts, 1) for path, parts in self._recorded.items() if parts}
        counts = [len(part.tokens) for part in completions]
        is_complete = all(len(routes) == sum(counts) for routes in whole.values()) and len(whole) == len(self._routers)
        if not is_complete and any(part.routes is None for part in completions):
            text = "the step's rollout has no routes to replay; put the phase after the rollout"
            raise UserError(f"{text}, or start vLLM with --enable-return-routed-experts", 2)
        self._cache, self._recorded, self._routes = None, {}, []
        for part, count, end in zip(completions, counts, accumulate(counts), strict=True):
            length = part.tokens.shape[1]
            is_token = (torch.arange(length) < part.ends[:, None]).to(self.device.device)
            routes = (
                {path: values[end - count : end] for path, values in whole.items()}
                if part.routes is None
                else {path: _select_layer(part.routes, path).to(self.device.device) for path in self._routers}
            )
            self._routes.append(
                {
                    path: pad(values, (0, 0, 0, length - values.shape[1])) * is_token.unsqueeze(-1)
                    for path, values in routes.items()
                }
            )

    def compute(self, totals: MetricTotals, step: Step) -> MetricValues:
        """Return other choices' share; None without choices."""
        changed, all_choices = totals["sums"].tolist()
        return {"route_difference": changed / all_choices if all_choices else None}


def _select_layer(routes: Tensor, path: str) -> Tensor:
    """Return a router's routes, (rows, length, choices), from the routes of all layers."""
    number = re.search(r"\blayers\.(\d+)\.", path)
    if number is None or int(number[1]) >= routes.shape[2]:
        raise UserError(
            f"the server's routes have {routes.shape[2]} layers, and none for {path}; serve the run's model"
        )
    return routes[:, :, int(number[1])].to(torch.int16)


def _pack_routes(batch: Any, routes: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a microbatch's routes by router, laid out as the batch's tree if it has one."""
    if not isinstance(batch, PolicyBatch) or (tree := batch.tree) is None:
        return routes
    return {path: tree.pack(values).masked_fill(tree.padding.unsqueeze(-1), 0) for path, values in routes.items()}
