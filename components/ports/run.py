"""Ports for training runs: identity, folder, time, steps, phases, batches, events, random numbers and signals."""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from fractions import Fraction
from math import gcd
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, get_args, runtime_checkable

import attrs
import torch
from torch import Tensor

from drawloom import Problem, above, internal, port, setting
from drawloom.components.ports.distributed import Mesh
from drawloom.components.state.step_state import StepState

run_log = logging.getLogger("drawloom.run")
"""The run's log, whose messages rank 0 also prints."""

PRINTED = "printed"
"""Mark of a record that was already printed on the terminal."""

STEP_LINE = "step_line"
"""Mark of a record with the numbers of a step."""


def is_marked(record: logging.LogRecord, mark: str) -> bool:
    """Return whether a record was logged with `extra={mark: True}`."""
    return bool(vars(record).get(mark))


MIN_SECONDS = 1e-9  # a coarse clock may return the same time twice

Mark = float | torch.cuda.Event
"""A point in time: seconds on the host's monotonic clock, or on a GPU an event in the current stream."""

Span = tuple[Mark, Mark]


def mark_time(device: torch.device, clock: Callable[[], float] = time.monotonic) -> Mark:
    """Return the present time of a device: on a GPU, when its queued work is finished. The host does not wait."""
    if device.type != "cuda":
        return clock()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def compute_seconds_between(start: Mark, end: Mark) -> float:
    """Return the seconds from one mark to another; waits until the GPU has reached the second."""
    if isinstance(start, float) and isinstance(end, float):
        return end - start
    end.synchronize()  # type: ignore[union-attr]
    return float(start.elapsed_time(end)) / 1000  # type: ignore[union-attr, arg-type]


@attrs.frozen
class Interval:
    """
    Time between the measurements of two consecutive steps, after all ranks have reached both.

    The spans in `excluded`, such as evaluations and saving, are within the interval and count in no rate.
    """

    start: Mark
    end: Mark
    excluded: Sequence[Span] = ()

    @property
    def total_seconds(self) -> float:
        """The seconds from start to end."""
        return compute_seconds_between(self.start, self.end)

    @property
    def excluded_seconds(self) -> float:
        """The seconds in excluded spans."""
        return sum(compute_seconds_between(start, end) for start, end in self.excluded)

    @property
    def training_seconds(self) -> float:
        """The seconds that count in rates, above 0."""
        return max(self.total_seconds - self.excluded_seconds, MIN_SECONDS)


@port
class RunInfo(Protocol):
    """The run's name, seed and folder."""

    @property
    def name(self) -> str:
        """The run's name."""

    @property
    def seed(self) -> int:
        """Seed from which all random numbers derive."""

    @property
    def folder_path(self) -> Path:
        """The run folder's path; to write into it, use the port RunFolder."""


@port
class RunFolder(Protocol):
    """The run folder, locked by this run while the graph is open."""

    @property
    def folder(self) -> Path:
        """The run folder's path."""


@port
class EnvironmentSource(Protocol):
    """A node with choices made by the machine instead of the recipe, such as the GPU or a kernel."""

    def list_versions_and_choices(self) -> Mapping[str, str]:
        """Return versions and choices by name, such as the GPU or a kernel; called on an open node."""


def _as_state(values: "StepState | Mapping[str, Any]") -> StepState:
    """Return the values as a StepState."""
    return values if isinstance(values, StepState) else StepState(values)


@attrs.define
class Step:
    """
    One optimizer step on its way through the phases: step `index`, counted from 1, of `total` steps.

    `state` maps names to the values that phases read and write; a plain mapping is converted to a StepState. `started`
    is the start on the host's monotonic clock. Rates are computed from the `interval` that ends when the step is
    measured; `excluded` has the spans of other work, such as evaluation and saving, since the last measurement. If a
    phase sets `goes_back` on all ranks, this step is skipped and the run continues
    from its newest checkpoint. A phase that ends the run calls `stop`; the phases after it see the last step.

    The state's value `skip`, float32 () on the gradients' device, is 1 if the update is skipped, else 0. On a GPU
    the host issues the update before it knows `skip`. `before_update` is called before every update.

    `epochs` are the epochs before and after the step, equal if the data counts none.
    """

    index: int
    total: int
    state: StepState = attrs.field(factory=StepState, converter=_as_state)
    started: float = attrs.field(factory=time.monotonic)
    excluded: list[Span] = attrs.field(factory=list)
    interval: Interval | None = None
    goes_back: bool = False
    before_update: Callable[[], object] = lambda: None
    epochs: tuple[Fraction, Fraction] = (Fraction(), Fraction())
    stop_reason: str = ""
    _skip_reasons: list[Callable[[], str]] = internal(factory=list)

    @property
    def is_last(self) -> bool:
        """Whether the run ends with this step."""
        return self.index == self.total or bool(self.stop_reason)

    def stop(self, reason: str) -> None:
        """
        End the run after this step as after its last one: with a checkpoint and the final tasks.

        Only a phase that is a `StoppingPhase` may call this; one rank's call is enough. `reason` is a sentence.
        """
        self.stop_reason = self.stop_reason or reason

    @property
    def tokens(self) -> int:
        """
        Token count for this step on all ranks, without padding; 0 before tokens are counted. Waits for the copy.
        """
        return round(self.state.number("tokens")) if "tokens" in self.state else 0

    def skip_update_if(self, condition: Tensor, reason: Callable[[], str]) -> None:
        """
        Skip the update if `condition`, bool () on any device, is true.

        `reason` is called when the host knows the state's numbers; it returns a sentence, or "" if it does not apply.
        """
        flag = condition.float()
        before = self.state.get("skip")
        self.state["skip"] = flag if before is None else torch.maximum(before, flag)
        self._skip_reasons.append(reason)

    def skip(self, reason: str) -> None:
        """Skip the update."""
        self.skip_update_if(torch.ones((), dtype=torch.bool), lambda: reason)

    @property
    def skip_reason(self) -> str:
        """Why the update is skipped, or "" if it is applied. Waits until the host knows `skip`."""
        if "skip" not in self.state or not self.state.number("skip"):
            return ""
        return next(filter(None, (reason() for reason in self._skip_reasons)), "a phase skipped it")

    def apply_update_unless_skipped(self, update: Callable[[Tensor | None], object]) -> None:
        """
        Apply an update, such as the optimizer's, unless the step is skipped.

        `update` gets None if the host knows the step is not skipped. On a GPU it gets the flag `skip`, float32 () on
        the GPU, and must change nothing if the flag is 1; the host does not wait.
        """
        self.before_update()
        flag: Tensor | None = self.state.get("skip")
        if flag is not None and flag.device.type in self.state.late_devices:
            update(flag)
        elif flag is None or not flag.item():
            update(None)


@contextmanager
def exclude_from_rates(step: Step, mesh: Mesh, device: torch.device) -> Iterator[None]:
    """
    Exclude the time within this context from the rates. A collective over all ranks at both ends.

    Without the collectives the time in which a slower rank still trains would be excluded, too.
    """
    mesh.world.max(torch.zeros((), device=device))
    start = mark_time(device)
    yield
    mesh.world.max(torch.zeros((), device=device))
    step.excluded.append((start, mark_time(device)))


@port
class Phase(Protocol):
    """Part of every step."""

    def run_phase(self, step: Step) -> None:
        """Run this phase for a step."""


@runtime_checkable
class NamesNumbers(Protocol):
    """A phase class with settings that name numbers in the state, such as `checkpoint.best`."""

    number_settings: ClassVar[tuple[str, ...]]


@runtime_checkable
class SavingPhase(Protocol):
    """A phase that saves after some steps. Saving steps get a longer timeout."""

    def saves_after(self, step: Step) -> bool:
        """Return whether `run_phase` saves in this step; the result is equal on all ranks."""


@runtime_checkable
class StoppingPhase(Protocol):
    """A phase that may call `Step.stop`. All ranks agree on the stop when the phase has run."""

    def stop_reason(self) -> str:
        """
        Return why the run has ended with the restored state, or "" if it goes on. All ranks return the same.

        The trainer asks before the first step: an ended run trains no further, unless its recipe allows more.
        """


@runtime_checkable
class PlannedPhase(Protocol):
    """A phase's component with values planned over the whole run, such as a learning-rate schedule."""

    @classmethod
    def depends_on_total_steps(cls, node: Any) -> bool:
        """Return whether a different step count would change any step's value."""

    @classmethod
    def check_total_steps(cls, node: Any, total: int) -> Iterator[Problem]:
        """Yield problems with the node's settings in a run with `total` steps."""


# All arithmetic with batch sizes is behind this port, so that no component divides by the world size itself.
@port
class Batching(Protocol):
    """Batch sizes, and the assignment from rows to ranks."""

    @property
    def global_size(self) -> int:
        """
        Rows in a step over all data-parallel ranks: the global batch size. If the batch size grows, its final value.
        """

    @property
    def micro_size(self) -> int:
        """Rows in a microbatch."""

    @property
    def dp_size(self) -> int:
        """Data-parallel size: the number of ranks that divide a step's rows."""

    @property
    def dp_rank(self) -> int:
        """Data-parallel rank: this rank's index among the data-parallel ranks, from 0."""

    def first_row_position(self, step: int) -> int:
        """
        Return the position in the endless row order where `step` (from 1) begins: the row count in all earlier steps.
        """

    def microbatch_row_positions(self, step: int) -> list[list[int]]:
        """Return this rank's microbatches in a step (from 1) as lists of positions in the endless row order."""


def choose_micro_size(sizes: Sequence[int], limit: int, replicas: int) -> int:
    """Return the largest number of rows up to `limit` dividing a replica's rows in all steps of these sizes."""
    share = max(gcd(*sizes) // replicas, 1)
    return max(rows for rows in range(1, min(limit, share) + 1) if share % rows == 0)


@port
class EpochCounter(Protocol):
    """Data with a known row count. An epoch is as many rows as all training sources have."""

    @property
    def rows_per_epoch(self) -> int:
        """Rows in an epoch."""

    def count_epochs_after(self, step: int) -> Fraction:
        """Return the exact number of epochs in all steps up to and including this one; 0 for step 0."""


EventKind = Literal[
    "run_started",
    "step_started",
    "phase_started",
    "data_loaded",
    "phase_ended",
    "step_ended",
    "saving_started",
    "saving_ended",
    "run_ended",
]


@attrs.frozen
class Event:
    """Event in the run, at a step and in a phase if there is one."""

    kind: EventKind
    step: Step | None = None
    phase: str = ""


@port
class Listener(Protocol):
    """
    Observer for all events in a run, or for some kinds (`SelectiveListener`). Its exceptions are logged and do not stop
    the run.
    """

    def on_event(self, event: Event) -> None:
        """Handle an event."""


@runtime_checkable
class SelectiveListener(Protocol):
    """A listener that observes only some event kinds."""

    observes: ClassVar[Collection[EventKind]]


def list_observed_event_kinds(listener: object) -> Collection[EventKind]:
    """Return the event kinds that a listener observes."""
    return listener.observes if isinstance(listener, SelectiveListener) else get_args(EventKind)


@port
class Events(Protocol):
    """Sender from which listeners get events."""

    def emit(self, event: Event) -> None:
        """Send an event to all listeners for its kind."""


FILES = "files"
"""The folder inside a run folder with copies of the files that nodes read: files/NODE/SETTING/NAME."""


@port
class ReadsFiles(Protocol):
    """
    A node that reads files outside the run folder, such as a tokenizer's; checkpoints are useless without these files.
    """

    def list_input_files(self) -> Mapping[str, Sequence[Path]]:
        """Return the existing files that this node reads, by setting; the run folder keeps copies."""


@port
class Randomness(Protocol):
    """Random generators for a run."""

    def stream(self, *purpose: str | int) -> torch.Generator:
        """Return a CPU generator determined by the run's seed and `purpose`."""


class StoppedError(BaseException):
    """
    A request by a signal to end the run.

    It is a BaseException like KeyboardInterrupt, so that no component catches it as an Exception.
    """

    def __init__(self, signal: int) -> None:
        super().__init__(signal)
        self.signal = signal


@port
class Stop(Protocol):
    """Signals that ask the run to end."""

    def agree_on_signal(self) -> int:
        """Return the signal number that any rank received, 0 if none; a collective, equal on all ranks."""

    def agree_on_reason(self, reason: str) -> str:
        """Return the first rank's reason that is not empty, "" if all are; a collective, equal on all ranks."""

    def raise_stopped_error_on_signal(self) -> AbstractContextManager[None]:
        """
        Return a context for the time after the last step, when all state is saved, in which a signal raises
        StoppedError.

        A signal that any rank received earlier raises on entry, a collective.
        """


@port
class FinalTask(Protocol):
    """
    A task after the last step, such as an export. Tasks are atomic and can be retried.

    The result records the weights' step. If the run is continued to more steps, the task runs again.
    """

    def has_result_of_step(self, step: int) -> bool:
        """Return whether the task was completed with the weights after this step, perhaps by an earlier process."""

    def run_after_training(self, step: int) -> None:
        """Run the task with the weights after this step, and replace an earlier step's result."""


@attrs.frozen(kw_only=True)
class Epochs:
    """An interval in epochs; an epoch may end within a step."""

    epochs: float = setting("epochs between two actions, also fractions, such as 0.25", check=above(0))


# Words instead of 0 or -1, so that a recipe is clear about "last" and "never".
Cadence = int | Literal["epoch", "last", "never"] | Epochs


def is_due(cadence: Cadence, step: Step) -> bool:
    """Return whether a cadence contains the step: the end of every n-th step or epoch and the last step, or none."""
    if step.is_last or cadence in ("last", "never"):
        return step.is_last and cadence != "never"
    if isinstance(cadence, int):
        return step.index % cadence == 0
    length = _convert_to_fraction(cadence.epochs if isinstance(cadence, Epochs) else 1)
    before, after = step.epochs
    return before // length < after // length


def count_steps_of_epochs(epochs: float, counter: EpochCounter) -> int:
    """Return the smallest step count with so many epochs."""
    return bisect_left(range(2**62), _convert_to_fraction(epochs), key=counter.count_epochs_after)


def _convert_to_fraction(epochs: float) -> Fraction:
    """Return a recipe's decimal number exactly, so that ten times 0.1 epochs are one."""
    return Fraction(str(epochs))


def describe_cadence_fault(value: Cadence) -> str | None:
    """Return a fault for a cadence below 1 step, else None."""
    return f"{value} steps is less than 1; 'never' turns it off" if isinstance(value, int) and value < 1 else None
