"""Steps: cadences, numbers known to the host late, and skipped updates."""

from collections.abc import Callable

import pytest
import torch

from drawloom.components.ports.run import Cadence, Step, describe_cadence_fault, is_due
from support.steps import LateState, late


@pytest.mark.parametrize(
    ("cadence", "steps"),
    [(1, [1, 2, 3, 4, 5, 6, 7]), (3, [3, 6, 7]), (7, [7]), (100, [7]), ("last", [7]), ("never", [])],
)
def test_a_cadence_selects_steps(cadence: Cadence, steps: list[int]) -> None:
    """A number selects its multiples and the last step, `last` only the last step, `never` none."""
    assert [index for index in range(1, 8) if is_due(cadence, Step(index, 7))] == steps


def test_a_cadence_of_no_steps_is_refused() -> None:
    """Zero and negative numbers are refused; one is accepted."""
    assert [cadence for cadence in (-1, 0, 1, "last", "never") if describe_cadence_fault(cadence)] == [-1, 0]


@pytest.mark.parametrize("reading", [lambda step: step.tokens, lambda step: step.skip_reason])
def test_late_numbers_are_waited_for_once_by_a_reader(reading: Callable[[Step], object]) -> None:
    """Before, the host has not waited; afterwards every number is known. The reason of the first phase is given."""
    for earlier in list[str](["", "a phase says so"]):
        step = Step(1, 2, LateState({"loss": torch.tensor(2.5), "tokens": torch.tensor(70.0), "lr": 0.1}))
        if earlier:
            step.skip(earlier)
        step.skip_update_if(torch.tensor(True), lambda: "the norm of the gradients is inf")
        step.state.start_copying_to_host()
        assert not step.state.is_on_host
        for _ in range(2):
            reading(step)
        assert step.state.is_on_host and step.state.number("loss") == 2.5
        assert (step.tokens, step.skip_reason) == (70, earlier or "the norm of the gradients is inf")
        assert len(late(step).arrivals) == 1


def test_conditions_of_several_phases_skip_a_step() -> None:
    """A step is skipped if any condition is true; a reason with a false condition is ignored."""
    step = Step(1, 2)
    step.skip_update_if(torch.tensor(False), lambda: "")
    assert (float(step.state["skip"]), step.skip_reason) == (0.0, "")
    step.skip("a phase says so")
    assert (float(step.state["skip"]), step.skip_reason) == (1.0, "a phase says so")
    step.skip_update_if(torch.tensor(False), lambda: "")
    assert step.state["skip"] == 1


@pytest.mark.parametrize(("is_skipped", "calls"), [(None, [None]), (False, [None]), (True, [])])
def test_an_update_is_applied_unless_the_host_knows_of_a_skip(is_skipped: bool | None, calls: list[object]) -> None:
    """On a CPU a skipped step does not call the update; on a device the update gets the flag without a wait."""
    step, flags = Step(1, 2), list[object]()
    if is_skipped is not None:
        step.skip_update_if(torch.tensor(is_skipped), lambda: "")
        on_device = Step(1, 2, LateState({"skip": step.state["skip"]}))
        on_device.apply_update_unless_skipped(lambda flag: flags.append(float(flag is not None and flag)))
        assert flags == [float(is_skipped)] and not late(on_device).arrivals
        flags.clear()
    step.apply_update_unless_skipped(flags.append)
    assert flags == calls
