"""Contracts for ports of a run."""

import typing
from contextlib import suppress
from typing import Any

import torch

from drawloom.graph.component import find_declared_reads_and_writes
from drawloom.graph.testing import expect
from drawloom.ports import (
    IN_PARAMETERS,
    LOSSES,
    EnvironmentSource,
    Event,
    EventKind,
    FinalTask,
    Listener,
    MissingStateError,
    Phase,
    ReadsFiles,
    Step,
    StepState,
)

VALUES: dict[str, Any] = {
    "batches": [],
    LOSSES: {"loss": torch.tensor([96.0]), "weight": torch.tensor([48.0]), "sums": {}},
    "loss": torch.tensor(2.0, dtype=torch.float64),
    "grad_norm": torch.tensor(1.0, dtype=torch.float64),
    "lr": 0.1,
    "validation_loss": 2.0,
    "skip": torch.tensor(0.0),
    "tokens": torch.tensor(48.0, dtype=torch.float64),
    "loss_weight": torch.tensor(48.0, dtype=torch.float64),
    "lr_factor": 1.0,
}
"""Values that shipped phases write, as inputs of the phases under test."""
MADE_UP = torch.tensor(1.0, dtype=torch.float64)
"""Any other required value; a phase may raise because it expects another kind of value."""


class ObservedState(StepState):
    """State of a step that records the names that are read and written in the global view."""

    def __init__(self, values: typing.Mapping[str, Any]) -> None:
        self.read: set[str] = set()
        self.written: set[str] = set()
        super().__init__(values)
        self.written.clear()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return super().__contains__(str(key))

    def __setitem__(self, key: str, value: Any) -> None:
        self.written.add(key)
        super().__setitem__(key, value)

    @classmethod
    def get_from_step(cls, step: Step) -> "ObservedState":
        """Return a step's state. Raises TypeError if a component has replaced it."""
        if not isinstance(step.state, cls):
            raise TypeError("step.state was replaced; write values into it instead")
        return step.state


def _run_steps_with_declared_values(phase: Phase) -> typing.Iterator[Step]:
    """Run the phase in two steps with its required values, and yield the steps."""
    flow = find_declared_reads_and_writes(phase)
    required = [name for name in (*flow.reads, *flow.changes) if not name.endswith("?") and name not in IN_PARAMETERS]
    for index in (1, 2):
        step = Step(index, 2, ObservedState({name: VALUES.get(name, MADE_UP) for name in required}), started=0.0)
        with suppress(MissingStateError if set(required) <= VALUES.keys() else Exception):
            phase.run_phase(step)
        yield step


def reads_only_what_it_declares(phase: Phase) -> None:
    """A phase reads only values that it declares to read."""
    for step in _run_steps_with_declared_values(phase):
        flow = find_declared_reads_and_writes(phase)
        declared = {name.removesuffix("?") for name in (*flow.reads, *flow.writes, *flow.changes)}
        undeclared = ", ".join(sorted(ObservedState.get_from_step(step).read - declared))
        expect(not undeclared, f"the phase reads {undeclared} without declaring it; write it in `reads`")


def writes_only_what_it_declares(phase: Phase) -> None:
    """A phase writes only values that it declares to write or change; `check` relies on it to order phases."""
    flow = find_declared_reads_and_writes(phase)
    for step in _run_steps_with_declared_values(phase):
        undeclared = sorted(ObservedState.get_from_step(step).written - {*flow.writes, *flow.changes})
        expect(not undeclared, f"the phase writes {', '.join(undeclared)} without declaring it; write it in `writes`")


def does_not_change_index_total_or_start_of_a_step(phase: Phase) -> None:
    """A phase does not change the index, the total or the start of a step."""
    for number, step in enumerate(_run_steps_with_declared_values(phase), 1):
        is_same = (step.index, step.total, step.started) == (number, 2, 0.0)
        expect(is_same, "the phase changes the index, total or start")


def handles_a_whole_run(listener: Listener) -> None:
    """A listener handles the events of a run of two steps without an error."""
    listener.on_event(Event("run_started"))
    for index in (1, 2):
        step = Step(index, 2, {"tokens": 64.0, "loss": 1.5, "grad_norm": 1.0, "lr": 0.1})
        for kind in ("step_started", "phase_started", "phase_ended", "saving_started", "saving_ended", "step_ended"):
            listener.on_event(Event(kind, step, "optimizer" if kind.startswith("phase") else ""))
    listener.on_event(Event("run_ended"))


def handles_unexpected_events(listener: Listener) -> None:
    """A listener handles events out of order and before any step without an error."""
    # a listener may join late, and a run may fail between any two events
    for kind in reversed(typing.get_args(EventKind)):
        listener.on_event(Event(kind, Step(1, 1), "optimizer"))


def a_task_is_finished_only_after_it_ran(task: FinalTask) -> None:
    """A task is not finished before `run_after_training` and finished after it, also after a second call."""
    expect(not task.has_result_of_step(1), "the task is finished before it has run")
    for _ in range(2):
        task.run_after_training(1)
        expect(task.has_result_of_step(1), "the task has run and is not finished")


def environment_choices_are_strings_and_repeatable(source: EnvironmentSource) -> None:
    """Names and values are texts, and the same at every call, because the process keeps its choices."""
    chosen = dict(source.list_versions_and_choices())
    expect(
        all(isinstance(text, str) and text for item in chosen.items() for text in item), f"{chosen} has other values"
    )
    expect(chosen == dict(source.list_versions_and_choices()), "a second call returns other choices")


def read_files_exist_by_name_of_setting(node: ReadsFiles) -> None:
    """The files exist, and their keys are names of settings, so that the run folder can copy them."""
    for setting, paths in node.list_input_files().items():
        expect(isinstance(setting, str) and setting, f"{setting!r} is not the name of a setting")
        expect(all(path.is_file() for path in paths), f"{setting} names something that is not a file: {paths}")
