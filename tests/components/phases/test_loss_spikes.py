"""Spikes of the loss."""

import logging
from typing import Any

import attrs
import pytest
import torch

from drawloom.components.phases.loss_spikes import LossSpikes
from drawloom.components.ports.run import Step
from drawloom.components.state.step_state import StepState
from drawloom.graph import UserError
from support.steps import LateState, make_skipped_step

CALM = [2.0, 2.1, 1.9, 2.0]


@attrs.define
class Data:
    """An endless order with 10 rows per step."""

    next_row_position: int = 40

    def next_step(self) -> list[Any]:
        self.next_row_position += 10
        return []

    def skip_to_position(self, position: int) -> None:
        self.next_row_position = position

    def cumulative_tokens_by_source(self, step: int) -> dict[str, float]:
        return {}


def make_phase(data: Data | None = None, **settings: Any) -> LossSpikes:
    return LossSpikes(data=data or Data(), **{"window": 4, "deviations": 3.0, **settings})


def after(phase: LossSpikes, *losses: float, first: int = 1) -> Step:
    """Return the last of several steps with these losses."""
    for index, loss in enumerate(losses, first):
        step = (
            Step(index, 99, {"loss": loss})
            if loss < float("inf")
            else make_skipped_step(index, 99, state={"loss": loss})
        )
        phase.run_phase(step)
    return step


@pytest.mark.parametrize("late", [False, True])
def test_spikes_are_reported_once_the_host_knows_them(late: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A loss far above the window is a warning; a skipped step, a small rise and a lower loss are not."""
    phase = make_phase()
    steps: list[Step] = []
    for index, loss in enumerate([*CALM, 9.0, float("inf"), 1.0], 1):
        step = Step(index, 7, (LateState if late else StepState)({"loss": torch.tensor(loss, dtype=torch.float64)}))
        if loss > 99:
            step.skip("the loss is inf")
        with caplog.at_level(logging.WARNING, "drawloom.run"):
            for before in steps:
                before.state.numbers()
            phase.run_phase(step)
        steps.append(step)
        assert not step.goes_back
        told = [record.getMessage() for record in caplog.records]
        assert len(told) == (index > 4 + late)
    assert told == [
        "step 5: the loss 9.0000 is a spike: it was 2.0000 with a deviation of 0.0707 in the 4 steps before"
    ]
    assert phase.state_dict() == {"losses": [1.9, 2.0, 9.0, 1.0], "times": 0}


def test_a_spike_goes_back_and_past_the_rows_of_its_step() -> None:
    """The step is skipped and goes back; restored, the data continue behind it, and the count of times is kept."""
    data = Data()
    phase = make_phase(data, go_back=1)
    after(phase, *CALM)
    saved = phase.state_dict()
    after(phase, 2.05, first=5)
    data.next_step()
    step = after(phase, 9.0, first=6)
    assert step.goes_back and "the run goes back, time 1 of 1" in step.skip_reason
    data.next_row_position = 40
    phase.load_state_dict(saved)
    phase.after_restore(1)
    assert data.next_row_position == 50 and phase.state_dict() == {"losses": CALM, "times": 1}
    phase.after_restore(1)
    assert not after(phase, 2.0, 2.1, first=5).goes_back and data.next_row_position == 50
    with pytest.raises(UserError, match=r"step 7: the loss .* after the run went back 1 times"):
        after(phase, 9.0, first=7)


def test_noise_among_equal_losses_is_not_a_spike() -> None:
    """If losses do not differ, a slightly higher one is no spike."""
    phase = make_phase(go_back=1)
    assert not after(phase, 2.0, 2.0, 2.0, 2.0, 2.0001).goes_back
    assert after(phase, 2.5).goes_back
