"""Ports of the training run: its identity, folder, steps, phases, events, metrics, checkpoints and signals."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, get_args, runtime_checkable

import attrs
import torch
from torch import Tensor

from drawloom.components.ports.slices import TensorSlice
from drawloom.components.state.step_state import StepState
from drawloom.graph import Problem, port


@port
class RunInfo(Protocol):
    """The name, seed and folder of the run."""

    @property
    def name(self) -> str:
        """The name of the run."""
        ...

    @property
    def seed(self) -> int:
        """The seed from which all random numbers of the run derive."""
        ...

    @property
    def path(self) -> Path:
        """The path of the run folder; to write into it, take the port RunFolder."""
        ...


@port
class RunFolder(Protocol):
    """The run folder, locked by this run while the graph is open."""

    @property
    def folder(self) -> Path:
        """The path of the run folder."""
        ...


def _as_state(values: "StepState | Mapping[str, Any]") -> StepState:
    return values if isinstance(values, StepState) else StepState(values)


@attrs.define
class Step:
    """
    One optimizer step on its way through the phases: `index` from 1, of `total`.

    `state` has the values that phases declare to read and write; a mapping of values may be given in its place.
    `started` is the start on the monotonic clock; `excluded_seconds` of the time since then were not spent on training
    (evaluation, saving). A phase that sets `goes_back`, on all ranks, has the run continue from its newest checkpoint
    after this step, which is skipped.

    Whether the update is skipped is `skip` in the state, float32 () on the device of the gradients: 1 if it is, else 0.
    On a GPU the host issues the update before it knows that number. `before_update` is called before every update.
    """

    index: int
    total: int
    state: StepState = attrs.field(factory=StepState, converter=_as_state)
    started: float = attrs.field(factory=time.monotonic)
    excluded_seconds: float = 0.0
    goes_back: bool = False
    before_update: Callable[[], object] = lambda: None
    _skip_reasons: list[Callable[[], str]] = attrs.field(init=False, factory=list)

    @property
    def last(self) -> bool:
        """Whether this is the last step of the run."""
        return self.index == self.total

    @property
    def tokens(self) -> int:
        """The tokens of this step on all ranks, without padding; 0 before they are counted. Waits for their copy."""
        return round(self.state.number("tokens")) if "tokens" in self.state else 0

    def skip_if(self, condition: Tensor, reason: Callable[[], str]) -> None:
        """
        Skip the update if a condition, bool () on any device, is true.

        `reason` is called when the host knows the state's numbers; it returns a sentence, or "" if it does not apply.
        """
        flag = condition.float()
        before = self.state.get("skip")
        self.state["skip"] = flag if before is None else torch.maximum(before, flag)
        self._skip_reasons.append(reason)

    def skip(self, reason: str) -> None:
        """Skip the update."""
        self.skip_if(torch.ones((), dtype=torch.bool), lambda: reason)

    @property
    def skip_reason(self) -> str:
        """Why the update is skipped; empty if it is applied. Waits for the copy of the numbers that decide it."""
        if "skip" not in self.state or not self.state.number("skip"):
            return ""
        return next(filter(None, (reason() for reason in self._skip_reasons)), "a phase skipped it")

    def apply_update(self, update: Callable[[Tensor | None], object]) -> None:
        """
        Apply an update of the step, such as the optimizer's, unless the step is skipped.

        `update` gets None if the host knows that the step is not skipped. On a GPU it gets the flag `skip`, float32 ()
        there, and changes nothing where that is 1; the host does not wait.
        """
        self.before_update()
        flag: Tensor | None = self.state.get("skip")
        if flag is not None and self.state.is_remote(flag):
            update(flag)
        elif flag is None or not flag.item():
            update(None)


@port
class Phase(Protocol):
    """A part of every step."""

    def run_phase(self, step: Step) -> None:
        """Run this phase of a step."""
        ...


@runtime_checkable
class NamesNumbers(Protocol):
    """A phase's class some of whose settings are names of numbers in the state, such as `checkpoint.best`."""

    number_settings: ClassVar[tuple[str, ...]]


@runtime_checkable
class SavingPhase(Protocol):
    """A phase that saves after some steps, for which a run allows more time than for others."""

    def saves_after(self, step: Step) -> bool:
        """Return whether `run_phase` saves in this step; equal on all ranks."""
        ...


@runtime_checkable
class PlannedPhase(Protocol):
    """A component of a phase whose values are planned over all steps of the run, as a learning-rate schedule's are."""

    @classmethod
    def derives_from_total(cls, node: Any) -> bool:
        """Return whether another number of steps would change the value of any step."""
        ...

    @classmethod
    def check_total(cls, node: Any, total: int) -> Iterator[Problem]:
        """Yield the problems of the node's settings in a run of `total` steps."""
        ...


# all arithmetic with batch sizes is behind this port, so that no component divides by the world size itself
@port
class Batching(Protocol):
    """Batch sizes, and which rows each rank sees in a step."""

    @property
    def global_size(self) -> int:
        """Rows in a step, over all data-parallel ranks; of a run that begins with fewer, those at its end."""
        ...

    @property
    def micro_size(self) -> int:
        """Rows in a microbatch."""
        ...

    @property
    def dp_size(self) -> int:
        """Data-parallel size: the number of parts into which the rows of a step are divided."""
        ...

    @property
    def dp_rank(self) -> int:
        """Data-parallel rank: the index of this rank's part, from 0."""
        ...

    def start(self, step: int) -> int:
        """The position in the endless order of rows with which a step (from 1) begins: the rows of all before it."""
        ...

    def positions(self, step: int) -> list[list[int]]:
        """This rank's microbatches of a step (from 1), each as positions in the endless order of rows."""
        ...


@port(named=True)
class Stateful(Protocol):
    """
    A node that a checkpoint saves, under the node's name.

    State is a nested dict with tensors, numbers, strings, booleans, None, or lists of those as leaves. All ranks have
    the same state, unless the node declares a separate one on each rank (`LocalState`), or a state that is sharded over
    ranks (`SlicedState`).

    Tensors of a state are read until `Step.apply_update` is called in the next step; a node that changes one earlier
    returns a copy.
    """

    def state_dict(self) -> dict[str, Any]:
        """The state that a bit-exact resume needs."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved state. Raises KeyError or ValueError if it does not fit the node."""
        ...


@runtime_checkable
class LocalState(Protocol):
    """A stateful node with a separate state on each rank."""

    state_is_local: ClassVar[bool]


@runtime_checkable
class SlicedState(Protocol):
    """
    A stateful node whose entries are sharded over ranks.

    Entries are loaded again, whichever ranks saved them, in whatever slices. Tensors with as many dimensions as the
    slice of their entry are slices, others are not.
    """

    def state_slices(self) -> Mapping[str, TensorSlice | None]:
        """Return the slice of each entry that this rank holds by name; None for a whole entry."""
        ...


@port
class GrowingState(Stateful, Protocol):
    """A stateful node whose first step adds tensors to its state, such as an optimizer."""

    def forecast_state(self) -> dict[str, Any]:
        """
        Return the state as it will be after the first step, with the shape and dtype of every tensor.

        Its tensors may be on the meta device: only their bytes are counted, for the check of free disk space.
        """
        ...


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
    """Something that happened in the run, at a step and in a phase if there is one."""

    kind: EventKind
    step: Step | None = None
    phase: str = ""


@port
class Listener(Protocol):
    """Observes a run's events, all or some (`SelectiveListener`). Its exceptions are logged and do not stop the run."""

    def on_event(self, event: Event) -> None:
        """Handle an event."""
        ...


@runtime_checkable
class SelectiveListener(Protocol):
    """A listener for events of some kinds only."""

    observes: ClassVar[Collection[EventKind]]


def observed_kinds(listener: object) -> Collection[EventKind]:
    """Return the kinds of events for a listener."""
    return listener.observes if isinstance(listener, SelectiveListener) else get_args(EventKind)


@port
class Events(Protocol):
    """Sends events to listeners."""

    def emit(self, event: Event) -> None:
        """Send an event to the listeners that observe its kind."""
        ...


METRIC_TOTALS = "metric_totals"
"""The name of the totals of all metrics in the state of a step: a dict by op of float64 tensors (numbers,)."""


Value = float | bool | None
"""The value of a metric; None if it has none at this step."""


@attrs.frozen
class Accumulator:
    """
    A float64 tensor of fixed shape that is combined over ranks at each step.

    `of` says which ranks have a part in a sum: "data" is what ranks see differently, such as losses, which those along
    `tensor` have alike; "rows" is what is counted from whole rows, which ranks along `context` share out;
    "activations" is what each rank has of hidden states; and "model" is what replicas hold alike, such as norms of
    gradients, of which one replica's is taken.
    """

    op: Literal["sum", "max", "min"] = "sum"
    shape: tuple[int, ...] = ()
    of: Literal["data", "rows", "activations", "model"] = "data"

    def identity(self) -> torch.Tensor:
        """What changes nothing when it is combined: the part of a rank that has none."""
        value = {"sum": 0.0, "max": float("-inf"), "min": float("inf")}[self.op]
        return torch.full(self.shape, value, dtype=torch.float64)


@port
@runtime_checkable
class Metric(Protocol):
    """
    Numbers worth writing down about each step.

    Each rank calls `update` once a step. What it gives is combined over all ranks, together with that of all other
    metrics, and `compute` makes values of the totals, which are the same on every rank. A metric of what a step has on
    every rank already needs no accumulators.
    """

    @property
    def accumulators(self) -> Mapping[str, Accumulator]:
        """By name, what is combined over ranks; the same on every rank once the run is open."""
        ...

    def update(self, step: Step) -> Mapping[str, torch.Tensor]:
        """This rank's part of accumulators, on any device; those that it leaves out it has no part in."""
        ...

    def compute(self, totals: Mapping[str, torch.Tensor], step: Step) -> Mapping[str, Value]:
        """Name to value, for this step, from float64 totals on the CPU. On a GPU it is called a step later."""
        ...


@port
@runtime_checkable
class Tracker(Protocol):
    """Stores the values of metrics by step; step 0 is before training. It writes on rank 0 only."""

    def track(self, step: int, values: Mapping[str, Value]) -> None:
        """Store the values of a step."""
        ...

    def rewind(self, step: int) -> None:
        """Delete the values of later steps: the run resumes after this one. Step -1 deletes all values."""
        ...


@port
@runtime_checkable
class Durable(Protocol):
    """Writes logs that must be on disk before a later checkpoint is committed."""

    def flush(self) -> None:
        """Return when everything written so far is on disk. May be called in any thread."""
        ...


@port
class KnownSteps(Protocol):
    """Has recorded numbers of some steps where damage is detected, as checkpoints have."""

    def known_steps(self) -> Iterable[tuple[int, Mapping[str, float | None]]]:
        """Return steps, each with numbers among its outputs; None for one that was not finite."""
        ...


@port
class Restorer(Protocol):
    """Saves and restores checkpoints of the run."""

    def restore(self) -> int:
        """Load the newest checkpoint into every stateful node; its step, 0 if there is none."""
        ...

    def save(self, step: Step) -> None:
        """Save a checkpoint after a step, unless it is saved already."""
        ...

    def wait_until_staged(self) -> None:
        """Wait until the state may change, because a save has copied it."""
        ...


@port
class AfterRestore(Protocol):
    """Acts when the state of the run has been restored."""

    def after_restore(self, done: int) -> None:
        """
        Act on every rank before the first step, and again whenever the run goes back to a checkpoint.

        `done` is the step of the checkpoint; 0 in a new run, which has nothing to restore.
        """
        ...


FILES = "files"
"""The folder in a run folder with copies of the files that nodes read: files/NODE/SETTING/NAME."""


@port
class ReadsFiles(Protocol):
    """Reads files outside of the run folder without which its checkpoints are of no use: a tokenizer, a config."""

    def files_read(self) -> Mapping[str, Sequence[Path]]:
        """The files, which exist, by the setting that names them or their folder; the run folder keeps copies."""
        ...


@port
class Randomness(Protocol):
    """Random generators of a run."""

    def stream(self, *purpose: str | int) -> torch.Generator:
        """A CPU generator that depends only on the run's seed and this purpose."""
        ...


class StoppedError(BaseException):
    """A signal has asked the run to end; like KeyboardInterrupt it is not an Exception, which a component may catch."""

    def __init__(self, signal: int) -> None:
        super().__init__(signal)
        self.signal = signal


@port
class Stop(Protocol):
    """Whether a signal asks the run to end."""

    def agreed(self) -> int:
        """The number of a signal that any rank received, 0 if none; a collective, equal on all ranks."""
        ...

    def raising(self) -> AbstractContextManager[None]:
        """
        Return a context for the time after the last step, when all state is saved: a signal raises StoppedError in it.

        A signal that was received earlier raises on entry.
        """
        ...


@port
class FinalTask(Protocol):
    """
    A task after the last step, such as an export. It is atomic, so that it can be retried.

    Its result records the step of the weights that it was made from: a run that is continued to more steps makes it
    again.
    """

    def is_finished(self, step: int) -> bool:
        """Whether the task was completed with the weights after this step, perhaps by an earlier process."""
        ...

    def finish(self, step: int) -> None:
        """Run the task with the weights after this step, and replace the result of an earlier step."""
        ...


# "last" and "never" instead of 0 or -1: a recipe says which of the two it means
Cadence = int | Literal["last", "never"]


def due(cadence: Cadence, step: Step) -> bool:
    """Whether a step is in the cadence: every n-th step and the last, only the last, or none."""
    if isinstance(cadence, int):
        return step.last or step.index % cadence == 0
    return cadence == "last" and step.last


def check_cadence(value: Cadence) -> str | None:
    """A setting's check: a number of steps is at least 1."""
    return f"{value} steps is less than 1; 'never' turns it off" if isinstance(value, int) and value < 1 else None
