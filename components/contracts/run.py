"""Contracts for ports of a run."""

import math
import threading
import typing
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from drawloom.components.ports.pipeline import LOSSES
from drawloom.components.ports.run import (
    AfterRestore,
    Batching,
    Durable,
    EnvironmentSource,
    Event,
    EventKind,
    Events,
    FinalTask,
    GrowingState,
    KnownSteps,
    Listener,
    Metric,
    Phase,
    Randomness,
    ReadsFiles,
    Restorer,
    RunFolder,
    RunInfo,
    Stateful,
    Step,
    Stop,
    Tracker,
    Value,
)
from drawloom.components.ports.stages import IN_PARAMETERS
from drawloom.components.state.step_state import MissingStateError, StepState
from drawloom.graph.component import find_declared_reads_and_writes
from drawloom.graph.testing import expect

VALUES: dict[str, Any] = {
    "batches": [],
    LOSSES: {"loss": torch.tensor([96.0]), "weight": torch.tensor([48.0]), "sums": {}},
    "loss": torch.tensor(2.0, dtype=torch.float64),
    "grad_norm": torch.tensor(1.0, dtype=torch.float64),
    "lr": 0.1,
    "validation_loss": 2.0,
    "skip": torch.tensor(0.0),
}
"""Values that shipped phases write, as inputs of the phases under test."""


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


def _steps_with_declared_values(phase: Phase) -> typing.Iterator[Step]:
    """Yield two steps with the values that the phase requires; nothing if no shipped phase writes one of the values."""
    flow = find_declared_reads_and_writes(phase)
    required = [name for name in (*flow.reads, *flow.changes) if not name.endswith("?") and name not in IN_PARAMETERS]
    if set(required) <= VALUES.keys():
        for index in (1, 2):
            yield Step(index, 2, ObservedState({name: VALUES[name] for name in required}))


def reads_only_what_it_declares(phase: Phase) -> None:
    """A phase reads only values that it declares to read."""
    for step in _steps_with_declared_values(phase):
        with suppress(MissingStateError):
            phase.run_phase(step)
        flow = find_declared_reads_and_writes(phase)
        declared = {name.removesuffix("?") for name in (*flow.reads, *flow.writes, *flow.changes)}
        undeclared = ", ".join(sorted(_require_unreplaced_state(step).read - declared))
        expect(not undeclared, f"the phase reads {undeclared} without declaring it; write it in `reads`")


def writes_only_what_it_declares(phase: Phase) -> None:
    """A phase writes only values that it declares to write or change; `check` relies on it to order phases."""
    flow = find_declared_reads_and_writes(phase)
    for step in _steps_with_declared_values(phase):
        phase.run_phase(step)
        undeclared = sorted(_require_unreplaced_state(step).written - {*flow.writes, *flow.changes})
        expect(not undeclared, f"the phase writes {', '.join(undeclared)} without declaring it; write it in `writes`")


def does_not_change_index_total_or_start_of_a_step(phase: Phase) -> None:
    """A phase does not change the index, the total or the start of a step."""
    for step in _steps_with_declared_values(phase):
        before = step.index, step.total, step.started
        phase.run_phase(step)
        expect((step.index, step.total, step.started) == before, "the phase changes the index, total or start")


def microbatches_have_exactly_the_rows_of_a_step(batching: Batching) -> None:
    """Microbatches on all data-parallel ranks are exactly the rows in a step, and steps follow without gaps."""
    expect(batching.first_row_position(1) == 0, f"the first step begins at position {batching.first_row_position(1)}")
    expect(0 <= batching.dp_rank < batching.dp_size, f"dp_rank {batching.dp_rank} is not below {batching.dp_size}")
    for step in (1, 2, 3):
        rows = len(batching.microbatch_row_positions(step)) * batching.micro_size * batching.dp_size
        size = batching.first_row_position(step + 1) - batching.first_row_position(step)
        expect(rows == size, f"microbatches have {rows} rows in a step of {size}")


def every_position_is_used_once(batching: Batching) -> None:
    """The positions of a rank are in the step's range of the endless order, without repetition."""
    for step in (1, 2, 3):
        microbatches = batching.microbatch_row_positions(step)
        positions = [position for microbatch in microbatches for position in microbatch]
        sizes = {len(microbatch) for microbatch in microbatches}
        expect(sizes == {batching.micro_size}, f"step {step} has microbatches of other sizes")
        inside = range(batching.first_row_position(step), batching.first_row_position(step + 1))
        expect(all(position in inside for position in positions), f"step {step} uses positions of another")
        expect(len(set(positions)) == len(positions), f"step {step} uses a position twice")


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


def _make_step(index: int) -> Step:
    values = {"loss": torch.tensor(2.0), "grad_norm": torch.tensor(1.0), "lr": 0.1, "tokens": 64.0}
    return Step(index, 10, ObservedState(values))


def _require_unreplaced_state(step: Step) -> ObservedState:
    state = step.state
    if not isinstance(state, ObservedState):
        raise TypeError("step.state was replaced; write values into it instead")
    return state


def _measure_on_a_single_rank(metric: Metric, step: Step) -> typing.Mapping[str, Value]:
    """Return the values of a metric at a step on a single rank."""
    parts = metric.measure_on_rank(step)
    for name, part in parts.items():
        expect(name in metric.accumulators, f"{name!r} is none of its accumulators")
        shape = metric.accumulators[name].shape
        expect(tuple(part.shape) == shape, f"{name} has shape {tuple(part.shape)}, and {shape} was declared")
    totals = {
        name: parts.get(name, accumulator.identity_element()).double().cpu()
        for name, accumulator in metric.accumulators.items()
    }
    return metric.compute(totals, step)


def metric_values_are_finite_numbers_booleans_or_none(metric: Metric) -> None:
    """Values are finite numbers, booleans or None; names are non-empty strings."""
    for index in (1, 2, 3):
        for name, value in _measure_on_a_single_rank(metric, _make_step(index)).items():
            expect(isinstance(name, str) and name, f"{name!r} is not a name")
            expect(value is None or isinstance(value, int | float), f"{name} is {value!r}")
            expect(value is None or math.isfinite(value), f"{name} is {value}")


def metric_names_are_equal_in_all_steps(metric: Metric) -> None:
    """All steps have the same metric names, so that a series has no gaps."""
    names = [sorted(_measure_on_a_single_rank(metric, _make_step(index))) for index in (1, 2, 3)]
    expect(names[0] == names[1] == names[2], f"the names change from step to step: {names}")


def measuring_does_not_change_the_step(metric: Metric) -> None:
    """Measuring a step does not change it."""
    step = _make_step(1)
    _measure_on_a_single_rank(metric, step)
    written = _require_unreplaced_state(step).written
    expect(not written and (step.index, step.tokens, step.skip_reason) == (1, 64, ""), "measuring changed the step")


def _draw_numbers(randomness: Randomness, *purpose: str | int) -> list[float]:
    return torch.rand(4, generator=randomness.stream(*purpose)).tolist()


def streams_depend_only_on_the_purpose(one: Randomness, other: Randomness) -> None:
    """Earlier draws do not change the numbers for a purpose."""
    first = _draw_numbers(one, "dropout", 3)
    _draw_numbers(other, "something else")
    torch.rand(7)
    expect(
        _draw_numbers(other, "dropout", 3) == first == _draw_numbers(one, "dropout", 3),
        "earlier draws change the numbers of a purpose",
    )


def different_purposes_have_different_numbers(randomness: Randomness) -> None:
    """Different purposes have different numbers, even if they look alike."""
    purposes: list[tuple[str | int, ...]] = [("a",), ("b",), ("a", 1), ("a", 2), ("a", "1"), ("a1",), (1, "a")]
    draws = [tuple(_draw_numbers(randomness, *purpose)) for purpose in purposes]
    expect(len(set(draws)) == len(draws), "two purposes give the same numbers")


def folder_is_writable(folder: RunFolder) -> None:
    """The run folder exists, and a file can be written in it."""
    expect(folder.folder.is_dir(), f"{folder.folder} is not a folder")
    probe = folder.folder / "written by a contract"
    probe.write_text("x", "utf-8")
    probe.unlink()


def run_name_seed_and_path_do_not_change(job: RunInfo) -> None:
    """The run has a name, a seed and a path, and none of them changes."""
    expect(isinstance(job.name, str) and job.name, "the run has no name")
    expect(isinstance(job.seed, int) and isinstance(job.folder_path, Path), "the run has no seed, or no path")
    expect((job.name, job.seed, job.folder_path) == (job.name, job.seed, job.folder_path), "the run's identity changes")


LEAVES = torch.Tensor | int | float | str | bool | None


def state_is_a_nested_dict_of_plain_values(node: Stateful) -> None:
    """The state is a nested dict; leaves are tensors, numbers, strings, booleans, None, or lists of such leaves."""
    _expect_plain_values(node.state_dict(), "the state")


def _expect_plain_values(state: Any, where: str) -> None:
    if isinstance(state, dict):
        for name, part in state.items():
            expect(isinstance(name, str), f"{where} has the key {name!r}, which is not a string")
            _expect_plain_values(part, f"{where}, {name}")
    elif isinstance(state, list | tuple):
        expect(all(isinstance(part, LEAVES) for part in state), f"{where} is a list of other than plain values")
    else:
        expect(isinstance(state, LEAVES), f"{where} is a {type(state).__name__}")


def loaded_state_equals_saved_state(saved: Stateful, fresh: Stateful) -> None:
    """A node that has loaded a state from a node with the same settings returns the same state."""
    state = saved.state_dict()
    fresh.load_state_dict(state)
    expect(_are_equal_states(fresh.state_dict(), state), "the loaded state differs from the saved state")


def two_state_dict_calls_return_equal_states(node: Stateful) -> None:
    """Two calls of state_dict in a row return equal states."""
    expect(_are_equal_states(node.state_dict(), node.state_dict()), "state_dict changes the state")


def _are_equal_states(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_are_equal_states(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_are_equal_states, one, other))
    return type(one) is type(other) and bool(one == other)


def forecast_state_has_all_entries_of_the_state(node: GrowingState) -> None:
    """A forecast has all entries in the present state, with the same shapes and dtypes."""
    _expect_entries_in_forecast(node.state_dict(), node.forecast_state_after_first_step(), "the state")


def _expect_entries_in_forecast(state: Any, forecast: Any, where: str) -> None:
    if isinstance(state, dict):
        for name, part in state.items():
            expect(name in forecast, f"{where}, {name} is not in the forecast")
            _expect_entries_in_forecast(part, forecast[name], f"{where}, {name}")
    elif isinstance(state, torch.Tensor):
        expect((state.shape, state.dtype) == (forecast.shape, forecast.dtype), f"{where} was forecast differently")


def known_steps_count_from_1_and_have_numbers(node: KnownSteps) -> None:
    """Known steps are counted from 1, and their values are numbers or None."""
    for step, values in node.recorded_step_values():
        expect(type(step) is int and step >= 1, f"{step!r} is not a step")
        kinds = {type(value) for value in values.values()}
        expect(kinds <= {int, float, type(None)}, f"step {step} has values of {kinds}")


def loading_another_nodes_state_raises(node: Stateful) -> None:
    """Loading another node's state raises KeyError or ValueError, unless the node has no state."""
    if not node.state_dict():
        return
    try:
        node.load_state_dict({"a state of another node": 1})
    except (KeyError, ValueError):
        return
    expect(False, "a state of another node is loaded without an error")


def without_a_signal_the_run_continues(stop: Stop) -> None:
    """Without a signal, `agree_on_signal` returns 0."""
    expect([stop.agree_on_signal(), stop.agree_on_signal()] == [0, 0], "the run is asked to stop")


def an_agreed_stop_reason_is_one_ranks_own(stop: Stop) -> None:
    """The reason is a rank's own words, and empty if no rank has one."""
    agreed = [stop.agree_on_reason(reason) for reason in ("", "enough", "")]
    expect(agreed == ["", "enough", ""], f"ranks agree on {agreed}")


def accepts_every_kind_of_value(tracker: Tracker) -> None:
    """A tracker accepts numbers, booleans and None, and names with dots and slashes."""
    tracker.track(1, {"loss": 1.5, "skipped": False, "validation_loss": None, "memory/peak.bytes": 3})
    tracker.track(2, {})


def steps_can_be_rewound(tracker: Tracker) -> None:
    """A tracker can delete steps and track them again, even if there is nothing to delete."""
    for step in (1, 2, 3):
        tracker.track(step, {"loss": float(step)})
    # twice, because a run may be killed and resumed again before it tracks anything
    tracker.rewind(1)
    tracker.rewind(1)
    for step in (2, 3):
        tracker.track(step, {"loss": float(-step)})
    tracker.rewind(0)
    tracker.track(1, {"loss": 0.0})
    tracker.rewind(-1)
    tracker.track(0, {"loss": 1.0})
    tracker.track(1, {"loss": 0.0})


def emitting_events_does_not_change_the_step(events: Events) -> None:
    """Events can be emitted at any time, and do not change their step."""
    for kind in reversed(typing.get_args(EventKind)):
        state = ObservedState({"tokens": 64.0, "loss": 1.5})
        step = Step(1, 2, state)
        events.emit(Event(kind))
        events.emit(Event(kind, step, "optimizer"))
        expect(step.index == 1 and step.state is state and not state.written, f"{kind} changes the step")


def flush_works_in_any_thread(durable: Durable) -> None:
    """Flush returns in any thread, even if nothing has been written."""
    errors: list[BaseException] = []

    def flush() -> None:
        try:
            durable.flush()
        except BaseException as error:
            errors.append(error)

    durable.flush()
    thread = threading.Thread(target=flush)
    thread.start()
    thread.join(10)
    expect(not thread.is_alive(), "flush does not return in another thread")
    expect(not errors, f"flush raises {errors[:1]} in another thread")


def a_saved_step_is_restored(restorer: Restorer) -> None:
    """Restore returns 0 without a checkpoint, and the step of the newest checkpoint after a save."""
    expect(restorer.restore() == 0, "without a checkpoint a step is restored")
    for index in (1, 2):
        restorer.save(Step(index, 10))
        restorer.keep_in_memory_for_joiners(Step(index, 10))
        restorer.wait_until_staged()
        restored = restorer.restore()
        expect(restored == index, f"step {index} was saved, and step {restored} is restored")


def a_step_may_be_saved_twice(restorer: Restorer) -> None:
    """A step can be saved twice."""
    for _ in range(2):
        restorer.save(Step(1, 10))
    expect(restorer.restore() == 1, "step 1 was saved twice, and is not restored")


def a_task_is_finished_only_after_it_ran(task: FinalTask) -> None:
    """A task is not finished before `run_after_training` and finished after it, also after a second call."""
    expect(not task.has_result_of_step(1), "the task is finished before it has run")
    for _ in range(2):
        task.run_after_training(1)
        expect(task.has_result_of_step(1), "the task has run and is not finished")


def after_restore_accepts_a_new_run(node: AfterRestore) -> None:
    """A node accepts the call in a new run, which has nothing to restore."""
    node.after_restore(0)


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
