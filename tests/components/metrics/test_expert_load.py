"""How routers share tokens out."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from drawloom.components.metrics.expert_load import ExpertLoad
from drawloom.components.model.decoder.branch_specs import ExpertSpec
from drawloom.components.model.decoder.experts import Router
from drawloom.components.ports.run import Step
from drawloom.graph import UserError
from support.doubles import FixedStages, Machine
from support.metrics import combine, measure
from support.qwen3 import cpu_kernels


class Layers(nn.Module):
    """Routers with 4 experts by layer and two choices per token; a token's scores are the softmax over its channels."""

    def __init__(self, *numbers: int) -> None:
        super().__init__()
        spec = ExpertSpec(num_experts=4, num_experts_per_tok=2, width=1)
        routers = {str(number): Router(4, spec, cpu_kernels()) for number in numbers}
        for router in routers.values():
            nn.init.eye_(router.weight)
        self.layers = nn.ModuleDict(routers)

    def forward(self, tokens: torch.Tensor) -> None:
        for router in self.layers.values():
            router(tokens, torch.ones(tokens.shape[:2]))


def open_metric(mesh: Any, *modules: nn.Module, **settings: Any) -> ExpertLoad:
    """Return the metric of stages on one rank."""
    metric = ExpertLoad(stages=FixedStages(modules), mesh=mesh, device=Machine(), **settings)
    metric.open()
    return metric


def test_values_cover_all_microbatches(one_rank: Any) -> None:
    """
    Layers in two stages have tokens by expert, adding up to all choices, their imbalance, and the scores' entropy.
    """
    first, last = Layers(2, 10), Layers(11)
    metric = open_metric(one_rank, first, last, by_expert=True)
    even, steep = torch.tensor([2.0, 2.0, 1.0, 0.0]), torch.tensor([9.0, 0.0, 1.0, -9.0])
    for tokens in (even.expand(1, 3, 4), steep.expand(2, 1, 4)):
        first(tokens)
        last(tokens)
    with torch.inference_mode():
        first(torch.eye(4)[None])
    entropy = [-sum(p * math.log(p) for p in logits.softmax(0).tolist()) for logits in (even, steep)]
    values = measure(metric, Step(1, 2))
    for layer in (2, 10, 11):
        assert [values[f"expert_tokens/{layer}/{expert}"] for expert in range(4)] == [5, 3, 2, 0]
        assert values[f"expert_imbalance/{layer}"] == 5 / 2.5
        assert values[f"router_entropy/{layer}"] == pytest.approx((3 * entropy[0] + 2 * entropy[1]) / 5, rel=1e-5)
    assert next(iter(values)) == "expert_imbalance/2" and len(values) == 3 * 6
    assert measure(metric, Step(2, 2))["expert_imbalance/2"] is None  # each step begins anew


def test_layers_of_the_loss_have_values_of_their_own(one_rank: Any) -> None:
    """A loss layer adds nothing to the model layer with its number."""
    module = Layers(3)
    module.loss = Layers(3)
    metric = open_metric(one_rank, module)
    module(torch.tensor([[[3.0, 2.0, 0.0, 0.0]]]))
    module.loss(torch.tensor([[[0.0, 3.0, 2.0, 0.0], [0.0, 3.0, 2.0, 0.0], [3.0, 0.0, 0.0, 2.0]]]))
    values = measure(metric, Step(1, 1))
    assert values["expert_imbalance/3"] == 2 and values["expert_imbalance/loss.layers.3"] == pytest.approx(4 / 3)


def test_ranks_add_up(one_rank: Any) -> None:
    """Two replicas have the values of both; without `by_expert` there are two values by layer."""
    modules = [Layers(0), Layers(0)]
    metrics = [open_metric(one_rank, module) for module in modules]
    modules[0](torch.tensor([[[3.0, 2.0, 0.0, 0.0]]]))
    modules[1](torch.tensor([[[0.0, 0.0, 2.0, 3.0], [0.0, 2.0, 0.0, 3.0]]]))
    parts = [metric.measure_on_rank(Step(1, 1)) for metric in metrics]
    values = metrics[0].compute(combine(metrics[0].accumulators, parts), Step(1, 1))
    assert values.keys() == {"expert_imbalance/0", "router_entropy/0"} and values["expert_imbalance/0"] == 2 / 1.5


def test_a_sure_router_has_no_entropy(one_rank: Any) -> None:
    """Scores equal to 0 add nothing, instead of nan."""
    module = Layers(0)
    metric = open_metric(one_rank, module)
    module(torch.tensor([[[1e4, 0.0, 0.0, 0.0]]]))
    assert measure(metric, Step(1, 1))["router_entropy/0"] == 0


def test_a_closed_metric_observes_nothing(one_rank: Any) -> None:
    """Closing removes the observer from all routers."""
    module = Layers(0)
    metric = open_metric(one_rank, module)
    metric.close()
    module(torch.ones(1, 1, 4))
    assert measure(metric, Step(1, 1))["expert_imbalance/0"] is None


def test_a_model_without_experts_is_refused(one_rank: Any) -> None:
    """The error comes before the first step."""
    with pytest.raises(UserError, match="no layer of the model has experts"):
        open_metric(one_rank, nn.Linear(2, 2))
