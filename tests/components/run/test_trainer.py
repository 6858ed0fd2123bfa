"""The loop."""

from typing import Any

import attrs
import pytest
import torch

from drawloom.components.ports.run import Event, Step
from drawloom.components.run.trainer import Trainer
from drawloom.graph import Ordered, UserError, component


@attrs.define
class Record:
    """A phase, restorer, finisher, stop and event bus that writes down what it is asked."""

    said: list[str] = attrs.field(factory=list)
    restored: int = 0
    finished: bool = False
    signal_after: int = 0
    last: int = 0

    def run_phase(self, step: Step) -> None:
        self.last = step.index
        self.said.append(f"phase {step.index}/{step.total}")

    def restore(self) -> int:
        return self.restored

    def save(self, step: Step) -> None:
        self.said.append(f"save {step.index}")

    def staged(self) -> None:
        self.said.append("staged")

    def is_finished(self) -> bool:
        return self.finished

    def finish(self) -> None:
        self.finished = True
        self.said.append("finish")

    def agreed(self) -> int:
        return 15 if self.signal_after and self.last >= self.signal_after else 0

    def emit(self, event: Event) -> None: ...

    def on_event(self, event: Event) -> None: ...

    def stream(self, *purpose: str | int) -> torch.Generator:
        return torch.Generator()


def trainer(record: Record, steps: int = 3, **changes: Any) -> Trainer:
    """A trainer all of whose parts are one record."""
    parts: dict[str, Any] = {"events": record, "stop": record, "checkpointer": record, "on_finish": [record], **changes}
    return Trainer(phases=Ordered([record], ["only"]), randomness=record, steps=steps, **parts)


def test_steps_count_from_one_to_the_last() -> None:
    """Every step goes through the phases once, then what is left is finished."""
    record = Record()
    trainer(record).run()
    assert record.said == ["phase 1/3", "phase 2/3", "phase 3/3", "finish"]


def test_a_restored_run_goes_on_behind_its_last_step() -> None:
    """No step is done twice and none is left out."""
    record = Record(restored=2)
    trainer(record).run()
    assert record.said == ["phase 3/3", "finish"]


@pytest.mark.parametrize(("restored", "said"), [(3, []), (5, [])])
def test_a_finished_run_does_nothing(restored: int, said: list[str]) -> None:
    """With all steps done and everything finished, nothing happens."""
    record = Record(restored=restored, finished=True)
    trainer(record).run()
    assert record.said == said


def test_what_was_not_finished_is_made_up_for() -> None:
    """All steps done, but the end was not: only the end happens."""
    record = Record(restored=3)
    trainer(record).run()
    assert record.said == ["finish"]


def test_a_signal_saves_and_ends_with_its_code() -> None:
    """The step under way is finished and saved; the exit code is 128 and the signal's number."""
    record = Record(signal_after=2)
    with pytest.raises(SystemExit) as ended:
        trainer(record).run()
    assert ended.value.code == 143 and record.said == ["phase 1/3", "phase 2/3", "save 2"]


@attrs.define
class Refusing(Record):
    """Refuses these steps."""

    which: set[int] = attrs.field(factory=set)

    def run_phase(self, step: Step) -> None:
        super().run_phase(step)
        step.skip_reason = "the loss is nan" if step.index in self.which else ""


@pytest.mark.parametrize(
    ("refused", "last"), [({2, 3, 4}, 4), ({1, 2, 4, 5, 7, 8, 9}, 9), ({1, 2, 4, 5, 7, 8}, 10), (set(), 10)]
)
def test_a_run_that_learns_nothing_any_more_stops(refused: set[int], last: int) -> None:
    """Three refused steps in a row are told with the last one's reason; a good one in between starts the count anew."""
    record = Refusing(which=refused)
    run = trainer(record, steps=10, max_skipped_steps=3).run
    if last < 10:
        with pytest.raises(UserError, match=f"3 steps in a row were skipped, at last step {last}: the loss is nan;"):
            run()
    else:
        run()
    assert record.last == last


def test_events_surround_steps_and_phases() -> None:
    """Listeners hear of the run, each step and each phase by name, in order."""
    heard: list[str] = []

    class Bus(Record):
        def emit(self, event: Event) -> None:
            heard.append(f"{event.kind} {event.phase}".strip())

    trainer(Record(), steps=1, events=Bus()).run()
    step = ["step_started", "phase_started only", "phase_ended only", "step_ended"]
    assert heard == ["run_started", *step, "run_ended"]


@component(writes=("weights",))
class Writer:
    """A phase that changes weights."""

    record: Any

    def run_phase(self, step: Step) -> None:
        self.record.said.append("write")


@component(changes=("weights",))
class Changer(Writer):
    """A phase that changes weights in place."""


@component(reads=("weights",), writes=("lr",))
class Reader(Writer):
    """A phase that does not."""


def test_weights_change_only_when_their_copy_is_done() -> None:
    """Before each phase that says that it writes or changes them the trainer waits for staging, and before no other."""
    record = Record()
    phases = [Reader(record=record), Writer(record=record), Changer(record=record)]
    parts: dict[str, Any] = {"events": record, "stop": record, "checkpointer": record, "randomness": record}
    Trainer(phases=Ordered(phases, ["a", "b", "c"]), steps=1, **parts).run()
    assert record.said == ["write", "staged", "write", "staged", "write"]
