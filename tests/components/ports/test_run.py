"""Which steps a cadence selects, and values of a step that the host learns late."""

import pytest
import torch

from drawloom.components.ports.run import Cadence, LateValues, Step, check_cadence, due


@pytest.mark.parametrize(
    ("cadence", "steps"),
    [(1, [1, 2, 3, 4, 5, 6, 7]), (3, [3, 6, 7]), (7, [7]), (100, [7]), ("last", [7]), ("never", [])],
)
def test_steps_of_a_cadence(cadence: Cadence, steps: list[int]) -> None:
    """A number selects its multiples and the last step, `last` only the last step, `never` none."""
    assert [index for index in range(1, 8) if due(cadence, Step(index, 7))] == steps


def test_a_cadence_of_no_steps_is_refused() -> None:
    """Zero and negative numbers are refused; one is accepted."""
    assert [cadence for cadence in (-1, 0, 1, "last", "never") if check_cadence(cadence)] == [-1, 0]


@pytest.mark.parametrize("reading", [Step.settle, lambda step: step.tokens, lambda step: step.skip_reason])
def test_late_values_are_waited_for_once_by_whatever_needs_them(reading: object) -> None:
    """Before, the step has what the device knows; then numbers. A reason that the host gave before stays."""
    waits: list[int] = []

    def late() -> LateValues:
        waits.append(1)
        return LateValues({"loss": 2.5}, 70, "the norm of the gradients is inf")

    for earlier in ("", "a phase says so"):
        step = Step(1, 2, tokens=7, skip_reason=earlier, outputs={"loss": torch.tensor(2.5), "lr": 0.1})
        step.late = late
        assert not step.settled and isinstance(step.outputs["loss"], torch.Tensor)
        for _ in range(2):
            reading(step)  # type: ignore[operator]
        assert step.settled and step.outputs == {"loss": 2.5, "lr": 0.1}
        assert (step.tokens, step.skip_reason) == (70, earlier or "the norm of the gradients is inf")
    assert len(waits) == 2


def test_a_phase_that_refuses_a_step_tells_the_device() -> None:
    """Optimizers that ask the device, because the host does not know yet, skip the step too."""
    step = Step(1, 2, found_inf=torch.zeros(()))
    step.skip_reason = ""
    assert step.found_inf == 0
    step.skip_reason = "a phase says so"
    assert step.found_inf == 1
