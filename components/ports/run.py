"""Ports of the training run: its identity, folder, steps, phases, events, metrics, checkpoints and signals."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import attrs
import torch

from drawloom.graph import port


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


@attrs.frozen
class LateValues:
    """What a device has computed of a step: outputs as numbers, the tokens on all ranks, and why it is skipped."""

    outputs: Mapping[str, float]
    tokens: int
    skip_reason: str


NO_NUMBERS = frozenset({"batches", "gradients", "local_gradients", "losses", "weights"})
"""What phases declare to read, write or change that is no number; all else are outputs that checkpoints record."""


@attrs.define
class Step:
    """
    One optimizer step on its way through the phases: `index` from 1, of `total`.

    `outputs` holds the values that phases declare to write and read. `tokens` counts the tokens of this step on all
    ranks, padding left out. `skip_reason` is why the update is skipped; empty if it is applied. `started` is the start
    on the monotonic clock; `excluded_seconds` of the time since then were not spent on training (evaluation, saving).
    `on_data_loaded` is called when the step's data has been loaded. A phase that sets `goes_back`, on all ranks, has
    the run continue from its newest checkpoint after this step, which is skipped.

    On a GPU the host issues the update before it knows whether to skip it. Then `found_inf`, a float32 () on the
    device, is 1 where it is to be skipped, `loss` and `grad_norm` of the outputs are float64 () there, and `late` waits
    for the numbers, which the host reads a step later: by `settle`, or in `tokens` or `skip_reason`.
    """

    index: int
    total: int
    _tokens: int = 0
    _skip_reason: str = ""
    started: float = attrs.field(factory=time.monotonic)
    excluded_seconds: float = 0.0
    outputs: dict[str, Any] = attrs.field(factory=dict)
    found_inf: torch.Tensor | None = None
    late: Callable[[], LateValues] | None = None
    on_data_loaded: Callable[[], object] = lambda: None
    goes_back: bool = False

    @property
    def last(self) -> bool:
        """Whether this is the last step of the run."""
        return self.index == self.total

    @property
    def tokens(self) -> int:
        """The tokens of this step on all ranks; those of this rank before they are summed."""
        self.settle()
        return self._tokens

    @tokens.setter
    def tokens(self, tokens: int) -> None:
        self._tokens = tokens

    @property
    def skip_reason(self) -> str:
        """Why the update is skipped; empty if it is applied."""
        self.settle()
        return self._skip_reason

    @skip_reason.setter
    def skip_reason(self, reason: str) -> None:
        self._skip_reason = reason
        if self.found_inf is not None and reason:
            self.found_inf.fill_(1)

    @property
    def settled(self) -> bool:
        """Whether the host knows all values of this step."""
        return self.late is None

    def settle(self) -> None:
        """Wait for the values that a device computes, and put them into the step; may be called in any thread."""
        if (late := self.late) is not None:
            found = late()
            self.outputs |= found.outputs
            self._tokens = found.tokens
            self._skip_reason = self._skip_reason or found.skip_reason
            self.late = None


@port
class Phase(Protocol):
    """A part of every step."""

    def run_phase(self, step: Step) -> None:
        """Run this phase of a step."""
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

    State is a nested dict with tensors, numbers, strings, booleans, None, or lists of those as leaves. The class
    attribute `state_is_local = True` declares a separate state on each rank. A method `state_slices()` declares that
    the entries of the state are sharded over ranks: it returns those that this rank holds by name, each with the
    TensorSlice of which its tensors are, or None for a whole one. They are loaded again, whichever ranks saved them,
    in whatever slices; tensors with as many dimensions as the slice are slices, others are not.

    Tensors of a state are read until the next phase that writes weights begins; a node that changes one earlier
    returns a copy.
    """

    def state_dict(self) -> dict[str, Any]:
        """The state that a bit-exact resume needs."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved state. Raises KeyError or ValueError if it does not fit the node."""
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
    """
    Observes a run's events. Its exceptions are logged and do not stop the run.

    The class attribute `observes` names the kinds of events that it is sent; without it, it is sent all.
    """

    def on_event(self, event: Event) -> None:
        """Handle an event."""
        ...


@port
class Events(Protocol):
    """Sends events to listeners."""

    def emit(self, event: Event) -> None:
        """Send an event to the listeners that observe its kind."""
        ...


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
class Tracker(Protocol):
    """Stores the values of metrics by step. It writes on rank 0 only."""

    def track(self, step: int, values: Mapping[str, Value]) -> None:
        """Store the values of a step."""
        ...

    def rewind(self, step: int) -> None:
        """Delete the values of later steps: the run resumes after this one."""
        ...


@port
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

    def staged(self) -> None:
        """Wait until the state may change, because a save has copied it; all ranks call this before weights change."""
        ...


@port
class RunCheck(Protocol):
    """Checks that open nodes fit one another, where that can't be seen before they are open."""

    def check_run(self) -> None:
        """Called on every rank when all nodes are open, before a restore. Raises UserError on every rank or none."""
        ...


@port
class AfterRestore(Protocol):
    """Acts when the state of the run has been restored."""

    def after_restore(self) -> None:
        """
        Called on every rank before the first step, also in a new run, which has nothing to restore; and again whenever
        the run goes back to a checkpoint.
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


@port
class Stop(Protocol):
    """Whether a signal asks the run to end."""

    def agreed(self) -> int:
        """The number of a signal that any rank received, 0 if none; a collective, equal on all ranks."""
        ...

    def raise_at_once(self) -> None:
        """Called after the last step, when all state is saved: from now on a signal raises SystemExit at once."""
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
