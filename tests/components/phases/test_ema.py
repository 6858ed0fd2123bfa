"""Averages of weights."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from drawloom.components.phases.ema import WeightAverage
from drawloom.components.ports.run import Step
from drawloom.components.state.step_state import StepState
from drawloom.graph.project import Recipe
from support.equality import assert_equal
from support.steps import LateState
from support.weights import Weights


def move(weights: Weights, number: int) -> None:
    """Change all parameters by a function of the number."""
    for _, parameter in weights.named_parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))


def values(average: WeightAverage) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in average.averages().items()}


@pytest.mark.parametrize("late", [False, True])
def test_averages_equal_those_of_torch(late: bool) -> None:
    """After every step they are bitwise equal to AveragedModel's; a step skipped by host or device does not count."""
    module = nn.Linear(3, 4)
    weights = Weights.from_parameters(dict(module.named_parameters()))
    ours = WeightAverage(parameters=weights, decay=0.9)
    theirs = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
    for number in range(1, 6):
        is_skipped = number == 3
        if not is_skipped:
            move(weights, number)
            theirs.update_parameters(module)
        step = Step(number, 5, (LateState if late else StepState)({}))
        step.skip_update_if(torch.tensor(is_skipped), lambda: "inf")
        ours.run_phase(step)
        assert_equal(values(ours), {name: parameter.detach() for name, parameter in theirs.module.named_parameters()})


def test_averages_of_narrow_weights_are_wide() -> None:
    """Small changes of bfloat16 weights are not lost in the average, and the weights come back to the bit."""
    weights = Weights(dtype=torch.bfloat16)
    average = WeightAverage(parameters=weights, decay=0.999)
    average.run_phase(Step(1, 2))
    first = values(average)
    move(weights, 1)
    average.run_phase(Step(2, 2))
    before = copy.deepcopy(dict(weights.named_parameters()))
    for name, tensor in average.averages().items():
        moved = torch.lerp(first[name], before[name].detach().float(), 0.001)
        assert tensor.dtype == torch.float32 and torch.allclose(tensor, moved) and not torch.equal(tensor, first[name])
    with pytest.raises(InterruptedError), average.use_averages():
        for name, parameter in weights.named_parameters():
            assert torch.equal(parameter, average.averages()[name].bfloat16())
        raise InterruptedError
    assert_equal(dict(weights.named_parameters()), before)


def test_a_resumed_average_is_the_one_that_was_interrupted() -> None:
    """Loaded averages are copies; without saved ones the average begins with the weights of the first step."""
    weights, others = Weights(), Weights()
    first, second = (WeightAverage(parameters=side) for side in (weights, others))
    second.load_state_dict(first.state_dict())
    assert not second.averages()
    for number in (1, 2, 3):
        move(weights, number)
        move(others, number)
        first.run_phase(Step(number, 3))
        if number == 1:
            second.load_state_dict(first.state_dict())
        else:
            second.run_phase(Step(number, 3))
    assert_equal(values(second), values(first))
    assert second.averages()["matrix"].data_ptr() != first.averages()["matrix"].data_ptr()
    with pytest.raises(KeyError, match="averages differ"):
        second.load_state_dict({"other": {}})


def test_nodes_that_would_use_other_weights_are_warned_of() -> None:
    """If one used node has the average, all other candidates are named; an unused node is not."""
    words = ("ema.use=phases.ema", "edit.trainer.phases.after.@optimizer=@ema")
    edges = ("export.average=@ema", "evaluate.average=@ema", "sample.average=@ema")
    warned = []
    for count in range(4):
        problems = Recipe.load("first_run", *words, *edges[:count]).graph.problems
        warned.append([problem.node for problem in problems if "uses the average" in problem.text])
    assert warned == [[], ["evaluate", "sample"], ["sample"], []]
