"""SGD with momentum."""

from typing import Any

import pytest
import torch
from torch import nn

from drawloom.components.optim.sgd import SGD
from drawloom.components.ports.run import Step
from drawloom.components.ports.stages import Role, default_role
from drawloom.graph.problems import RecipeError
from drawloom.graph.project import Recipe
from support.checkpoints import SingleRankMesh
from support.steps import LateState


class Weight:
    """One weight."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.ones(1, 1))

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [("weight", self.weight)]

    def parameter_slices(self) -> dict[str, Any]:
        return dict.fromkeys(name for name, _ in self.named_parameters())

    def roles(self) -> dict[str, Role]:
        return {name: default_role(name, part) for name, part in self.named_parameters()}

    def owned_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return self.named_parameters()

    def sum_remaining_gradients(self) -> None:
        pass


def test_momentum_adds_up_gradients() -> None:
    """Two equal gradients move the weight by lr * g * (1 + 1 + momentum)."""
    parameters = Weight()
    sgd = SGD(parameters=parameters, mesh=SingleRankMesh(), lr=0.1, momentum=0.5)
    sgd.open()
    for number in (1, 2):
        parameters.weight.grad = torch.ones(1, 1)
        sgd.run_phase(Step(number, 2))
    torch.testing.assert_close(parameters.weight.detach(), torch.full((1, 1), 1 - 0.1 * 2.5))


VARIANTS: list[dict[str, Any]] = [
    {"dampening": 0.3},
    {"nesterov": True},
    {"maximize": True, "dampening": 0.5},
    {"maximize": True, "nesterov": True, "momentum": 0.5},
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_steps_equal_those_of_torch(variant: dict[str, Any]) -> None:
    """With dampening, Nesterov momentum and maximization, weights are bitwise equal to torch.optim.SGD's."""
    ours, theirs = Weight(), Weight()
    sgd = SGD(parameters=ours, mesh=SingleRankMesh(), lr=0.1, weight_decay=0.2, **variant)
    sgd.open()
    oracle = torch.optim.SGD([theirs.weight], lr=0.1, weight_decay=0.2, fused=True, **{"momentum": 0.9, **variant})
    for number in (1, 2, 3):
        for side in (ours, theirs):
            side.weight.grad = torch.full((1, 1), 1.5 / number)
        sgd.run_phase(Step(number, 3))
        oracle.step()
        assert torch.equal(ours.weight, theirs.weight)


@pytest.mark.parametrize("skipped", [{1, 3}, {1, 2}, {2}])
def test_with_dampening_a_step_that_the_device_skips_leaves_no_momentum(skipped: set[int]) -> None:
    """Weights equal a run's without the skipped steps, even if the first step is skipped."""
    late, known = Weight(), Weight()
    ours, theirs = (SGD(parameters=side, mesh=SingleRankMesh(), lr=0.1, dampening=0.5) for side in (late, known))
    ours.open()
    theirs.open()
    for number in range(1, 6):
        reason = "the norm is inf" if number in skipped else ""
        step = Step(number, 5, LateState())
        step.skip_update_if(torch.tensor(number in skipped), lambda reason=reason: reason)  # type: ignore[misc]
        late.weight.grad = torch.full((1, 1), float("inf") if reason else float(number))
        ours.run_phase(step)
        if not reason:
            known.weight.grad = torch.full((1, 1), float(number))
            theirs.run_phase(Step(number, 5))
        assert torch.equal(late.weight, known.weight)


class TwoWeights(Weight):
    """Two weights, the second without a gradient at first."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Parameter(torch.ones(1, 1))

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [("weight", self.weight), ("other", self.other)]


def test_a_weight_may_have_its_first_gradient_later() -> None:
    """Its momentum begins then, like the other weight's did."""
    parameters = TwoWeights()
    sgd = SGD(parameters=parameters, mesh=SingleRankMesh(), lr=0.1, momentum=0.5)
    sgd.open()
    for number in (1, 2):
        parameters.weight.grad = torch.ones(1, 1)
        parameters.other.grad = torch.ones(1, 1) if number == 2 else None
        sgd.run_phase(Step(number, 2))
    assert parameters.other.item() == pytest.approx(0.9)
    assert parameters.weight.item() == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nesterov=true", "momentum=0.0"), "Nesterov momentum needs momentum above 0"),
        (("nesterov=true", "dampening=0.5"), "no dampening; they are 0.9 and 0.5"),
        (("dampening=0.5", "momentum=0.0"), "dampening does nothing without momentum"),
    ],
)
def test_check_refuses_settings_that_momentum_does_not_have(words: tuple[str, ...], message: str) -> None:
    """torch would raise a traceback for the first two, and ignore the third."""
    with pytest.raises(RecipeError, match=message):
        Recipe.load(
            "first_run", "optimizer.use=optim.sgd", "optimizer.lr=0.1", *(f"optimizer.{word}" for word in words)
        ).check()
