"""How the learning goes."""

import torch

from drawloom.components.metrics.learning import Learning
from drawloom.components.ports.run import Step
from support.metrics import measure
from support.steps import make_skipped_step


def test_values_of_the_step_are_measured_in_a_fixed_order() -> None:
    """Tensors and numbers become floats; other values of the step are no metrics."""
    step = Step(3, 9, state={"lr": 1, "loss": torch.tensor(2.5), "grad_norm": torch.tensor(0.5).double(), "losses": []})
    values = measure(Learning(), step)
    assert list(values.items()) == [("loss", 2.5), ("grad_norm", 0.5), ("lr", 1.0)]
    assert all(type(value) is float for value in values.values())


def test_an_evaluated_step_has_its_held_out_loss() -> None:
    """The loss has its own name."""
    assert measure(Learning(), Step(1, 1, state={"validation_loss": 1.5})) == {"validation_loss": 1.5}


def test_a_refused_step_has_no_loss() -> None:
    """For any loss, the metric is None, and the step is marked as refused."""
    step = make_skipped_step(1, 9, state={"loss": float("nan"), "grad_norm": 3.0})
    assert list(measure(Learning(), step).items()) == [("loss", None), ("grad_norm", 3.0), ("skipped", True)]
