"""The size of activations, layer by layer."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drawloom.components.metrics.activation_rms import ActivationRms
from drawloom.components.ports.model import BatchContext, TokenContext
from drawloom.components.ports.run import Step
from drawloom.graph import UserError
from support.doubles import FixedStages, Machine
from support.metrics import combine, measure


class Layers(nn.Module):
    """Layers that multiply their input by their number plus two."""

    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): nn.Identity() for number in numbers})

    def forward(self, hidden: Tensor, shared: BatchContext) -> Tensor:
        for number, layer in self.layers.items():
            hidden = layer(hidden * (int(number) + 2))
        return hidden


def of_tokens(count: int) -> BatchContext:
    """Return the stages' context for a microbatch with one row."""
    return TokenContext(torch.arange(count)[None], torch.zeros(1, count, dtype=torch.int64))


def open_metric(mesh: Any, *modules: nn.Module) -> ActivationRms:
    """Return a metric of stages on one rank."""
    metric = ActivationRms(stages=FixedStages(modules), mesh=mesh, device=Machine())
    metric.open()
    return metric


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_microbatches_of_a_step_count_alike_and_no_evaluation(one_rank: Any, dtype: torch.dtype) -> None:
    """
    The mean is over two stages and microbatches in two sizes; steps begin anew, and one without a pass has no value.
    """
    first, last = Layers([0, 1]), Layers([2])
    metric = open_metric(one_rank, first, last)
    inputs = [torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows)).to(dtype) for rows in (1, 5)]
    for hidden in inputs:
        last(first(hidden, of_tokens(len(hidden))), of_tokens(len(hidden)))
    with torch.inference_mode():
        first(inputs[0] * 100, of_tokens(1))
    root = float(torch.cat(inputs).double().square().mean().sqrt())
    expected = {f"activation_rms/{layer}": size * root for layer, size in enumerate((2, 6, 24))}
    assert measure(metric, Step(1, 2)) == pytest.approx(expected, rel=1e-2 if dtype == torch.bfloat16 else 1e-6)
    assert measure(metric, Step(2, 2)) == dict.fromkeys(expected)


def test_layers_of_the_loss_are_not_layers_of_the_model(one_rank: Any) -> None:
    """A loss layer changes no value for the model layer with its number."""
    module = Layers([4])
    module.loss = Layers([4])
    metric = open_metric(one_rank, module)
    module.loss(module(torch.ones(3, 2), of_tokens(3)), of_tokens(3))
    assert measure(metric, Step(1, 1)) == pytest.approx({"activation_rms/4": 6.0})


def test_replicas_count_by_their_tokens(one_rank: Any) -> None:
    """Two ranks with batches of different size have the root mean square over all; an infinite one is None."""
    modules = [Layers([4]), Layers([4])]
    metrics = [open_metric(one_rank, module) for module in modules]
    for module, hidden in zip(modules, (torch.ones(3, 2), torch.full((1, 2), 2.0)), strict=True):
        module(hidden, of_tokens(len(hidden)))
    parts = [metric.measure_on_rank(Step(1, 1)) for metric in metrics]
    values = metrics[0].compute(combine(metrics[0].accumulators, parts), Step(1, 1))
    assert values == pytest.approx({"activation_rms/4": 6 * ((3 * 1 + 1 * 4) / 4) ** 0.5})
    modules[0](torch.full((1, 2), float("inf")), of_tokens(1))
    assert measure(metrics[0], Step(1, 1)) == {"activation_rms/4": None}


def test_rows_that_fill_up_a_rank_do_not_count(mesh_of: Any) -> None:
    """With 3 tokens over 4 ranks along `tensor`, the last rank has no token, whatever its row holds."""
    modules = [Layers([0]) for _ in range(4)]
    metrics = [
        open_metric(mesh_of(sizes={"tensor": 4}, indices={"tensor": n}), rank_module)
        for n, rank_module in enumerate(modules)
    ]
    for number, module in enumerate(modules):
        module(torch.full((1, 2), number + 1.0), of_tokens(3))
    parts = [metric.measure_on_rank(Step(1, 1)) for metric in metrics]
    values = metrics[0].compute(combine(metrics[0].accumulators, parts), Step(1, 1))
    assert values == pytest.approx({"activation_rms/0": 2 * ((1 + 4 + 9) / 3) ** 0.5})


def test_a_closed_metric_observes_nothing(one_rank: Any) -> None:
    """Closing removes the hooks."""
    module = Layers([0])
    metric = open_metric(one_rank, module)
    metric.close()
    module(torch.ones(1, 2), of_tokens(1))
    assert measure(metric, Step(1, 1)) == {"activation_rms/0": None}


def test_a_model_without_numbered_layers_is_refused(one_rank: Any) -> None:
    """The error comes before the first step."""
    with pytest.raises(UserError, match=r"no module of the model is called layers\.<number>"):
        open_metric(one_rank, nn.Linear(2, 2))
