"""Histograms of gradients and weights."""

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.metrics.group import MetricGroup
from drawloom.components.metrics.histograms import Histograms
from drawloom.components.ports.run import Step
from drawloom.components.ports.stages import Role, default_role
from drawloom.components.ports.tracking import Histogram
from drawloom.graph import UserError
from support.metrics import combine

NAMES = ("layers.0.norm", "layers.0.weight", "layers.1.weight")


@attrs.frozen
class Weights:
    """A rank's parameters, all counted."""

    parameters: dict[str, nn.Parameter]

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [*self.parameters.items()]

    def parameter_slices(self) -> dict[str, Any]:
        return dict.fromkeys(self.parameters)

    def roles(self) -> dict[str, Role]:
        return {name: default_role(name, part) for name, part in self.named_parameters()}

    def owned_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return self.named_parameters()

    def sum_remaining_gradients(self) -> None:
        pass


def draw_weights(rows: slice = slice(None)) -> Weights:
    """Return parameters with gradients, partly on this rank."""
    generator = torch.Generator().manual_seed(0)
    parameters = {}
    for name in NAMES:
        weight, gradient = (torch.randn(12, 5, generator=generator)[rows] for _ in range(2))
        parameters[name] = nn.Parameter(weight.clone())
        parameters[name].grad = gradient.clone()
    return Weights(parameters)


def open_metric(weights: Weights, mesh: Any, **settings: Any) -> Histograms:
    """Return an open metric of a rank."""
    metric = Histograms(parameters=weights, mesh=mesh, device=ComputeDevice(kind="cpu"), **{"every": 1, **settings})
    metric.open()
    return metric


def distributions(metrics: Sequence[Histograms], step: Step) -> dict[str, Histogram]:
    """Return a step's histograms after its phase, from the parts of all ranks."""
    totals = combine(metrics[0].accumulators, [metric.measure_on_rank(step) for metric in metrics])
    return dict(metrics[0].distributions(totals, step))


def assert_is_histogram_of(histogram: Histogram, tensor: Tensor, bins: int) -> None:
    """Compare with numpy's histogram of the elements."""
    counts, edges = np.histogram(tensor.detach().double().numpy(), bins)
    assert histogram.counts == tuple(counts)
    assert histogram.edges == pytest.approx(edges.tolist())


def test_counts_equal_those_of_numpy(one_rank: Any) -> None:
    """A matching parameter has a histogram for gradients and one for weights, between its own bounds."""
    weights = draw_weights()
    metric = open_metric(weights, one_rank, targets=["*.weight"], bins=7)
    metric.run_phase(Step(1, 9))
    histograms = distributions([metric], Step(1, 9))
    assert [*histograms] == [f"{kind}/layers.{number}.weight" for kind in ("gradients", "weights") for number in (0, 1)]
    for name in NAMES[1:]:
        parameter = weights.parameters[name]
        assert parameter.grad is not None
        assert_is_histogram_of(histograms[f"weights/{name}"], parameter, 7)
        assert_is_histogram_of(histograms[f"gradients/{name}"], parameter.grad, 7)


def test_a_pattern_may_have_one_histogram_for_all_its_parameters(one_rank: Any) -> None:
    """All matching parameters' elements count together."""
    weights = draw_weights()
    metric = open_metric(weights, one_rank, targets=["*.weight", "*"], per="pattern", of=("weights",))
    metric.run_phase(Step(1, 9))
    histograms = distributions([metric], Step(1, 9))
    tensors = [weights.parameters[name].flatten() for name in NAMES]
    assert_is_histogram_of(histograms["weights/*.weight"], torch.cat(tensors[1:]), 64)
    assert_is_histogram_of(histograms["weights/*"], torch.cat(tensors), 64)


@attrs.define
class SharedBounds:
    """A group whose ranks run one after the other, twice: the second time all have the maximum."""

    rank: int = 0
    size: int = 2
    maximum: Tensor | None = None

    def max(self, tensor: Tensor) -> None:
        self.maximum = tensor.clone() if self.maximum is None else torch.maximum(self.maximum, tensor)
        tensor.copy_(self.maximum)


def test_ranks_with_slices_have_the_histogram_of_the_whole(one_rank: Any, mesh_of: Any) -> None:
    """Two ranks with rows of the same parameters agree on the bounds; their counts add up to one process's."""
    world = SharedBounds()
    mesh = mesh_of(world=world)
    parts = [open_metric(draw_weights(rows), mesh, targets=["*"]) for rows in (slice(0, 3), slice(3, None))]
    for _ in range(2):
        for metric in parts:
            metric.run_phase(Step(1, 9))
    whole = open_metric(draw_weights(), one_rank, targets=["*"])
    whole.run_phase(Step(1, 9))
    assert distributions(parts, Step(1, 9)) == distributions([whole], Step(1, 9))


def test_elements_that_are_not_finite_are_left_out(one_rank: Any) -> None:
    """They neither count nor stretch the bounds; equal elements have a width, and nothing has no histogram."""
    tensors = {"some": [1.0, float("nan"), 3.0, float("inf")], "equal": [2.0, 2.0], "none": [float("nan")]}
    weights = Weights({name: nn.Parameter(torch.tensor(values)) for name, values in tensors.items()})
    metric = open_metric(weights, one_rank, targets=["*"], bins=2)
    metric.run_phase(Step(1, 9))
    assert distributions([metric], Step(1, 9)) == {
        "weights/some": Histogram(1.0, 3.0, (1.0, 1.0)),
        "weights/equal": Histogram(1.5, 2.5, (0.0, 2.0)),
    }


def test_steps_between_have_no_histogram(one_rank: Any) -> None:
    """With `every` = 2 of five steps: the second, the fourth and the last."""
    metric = open_metric(draw_weights(), one_rank, targets=["*"], every=2)
    measured = []
    for index in range(1, 6):
        metric.run_phase(Step(index, 5))
        measured.append(bool(distributions([metric], Step(index, 5))))
    assert measured == [False, True, False, True, True]


def test_a_group_passes_histograms_on_with_its_prefix(one_rank: Any) -> None:
    """A group treats histograms like values."""
    metric = open_metric(draw_weights(), one_rank, targets=["*norm"])
    group = MetricGroup(members=[metric], prefix="student/")
    metric.run_phase(Step(1, 1))
    totals = combine(group.accumulators, [group.measure_on_rank(Step(1, 1))])
    names = [*group.distributions(totals, Step(1, 1))]
    assert names == ["student/gradients/layers.0.norm", "student/weights/layers.0.norm"]


def test_a_pattern_without_a_parameter_is_refused(one_rank: Any) -> None:
    """The message names the pattern, and a parameter to write one for."""
    with pytest.raises(
        UserError, match=r"the pattern 'layer\.\*' .* matches no trained parameter; one is called 'layers"
    ):
        open_metric(draw_weights(), one_rank, targets=["*norm", "layer.*"])
