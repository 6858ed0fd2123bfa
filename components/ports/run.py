"""The run: who it is, where it writes, its steps, and what its parts promise the loop."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import attrs
import torch

from drawloom.graph import port


@port
class RunInfo(Protocol):
    """Which run this is."""

    @property
    def name(self) -> str: ...

    @property
    def seed(self) -> int:
        """The one number from which everything random derives."""
        ...

    @property
    def path(self) -> Path:
        """The run folder; to write into it, take the port RunFolder."""
        ...


@port
class RunFolder(Protocol):
    """The run folder, owned by this run alone from the moment the graph is open until it closes."""

    @property
    def folder(self) -> Path: ...


@attrs.define
class Step:
    """
    One optimizer step on its way through the phases: `index` from 1, of `total`.

    Phases leave values for one another under the names that they declare. `tokens` counts the tokens that all ranks
    learned from in this step; `refused` says why the step must not be applied, if so. `started` is when it began, by
    the monotonic clock, and `aside` the seconds since then that went into something other than learning.
    """

    index: int
    total: int
    tokens: int = 0
    skip_reason: str = ""
    started: float = attrs.field(factory=time.monotonic)
    excluded_seconds: float = 0.0
    outputs: dict[str, Any] = attrs.field(factory=dict)

    @property
    def last(self) -> bool:
        """Whether no step follows."""
        return self.index == self.total


@port
class Phase(Protocol):
    """A part of every step."""

    def run_phase(self, step: Step) -> None:
        """Do this phase's part of a step."""
        ...


@port
class Batching(Protocol):
    """How rows become steps and microbatches: the one place with that arithmetic."""

    @property
    def global_size(self) -> int:
        """Rows in a step, over all replicas."""
        ...

    @property
    def micro_size(self) -> int:
        """Rows in a microbatch."""
        ...

    @property
    def dp_size(self) -> int:
        """How many parts the rows of a step are dealt out in, each to the ranks that share them."""
        ...

    @property
    def dp_rank(self) -> int:
        """Which of the parts is this rank's, from 0."""
        ...

    @property
    def microbatches(self) -> int:
        """Microbatches in a step on each replica."""
        ...

    def positions(self, step: int) -> list[list[int]]:
        """This replica's microbatches of a step (from 1), each as places in the endless order of rows."""
        ...


@port(named=True)
class Stateful(Protocol):
    """
    A node that a checkpoint saves, under the node's name.

    State is a dict that may hold dicts, and at its leaves tensors, numbers, strings, booleans, None, or lists of
    those. A class attribute `state_is_local = True` says that each rank has a state of its own. A method
    `state_names()` says that the entries of the state are spread over ranks, and gives the names of those that this
    one holds; it gets back these, whichever ranks saved them.

    A tensor in a state may be read until the next phase begins that writes weights; a node that changes one before,
    and is larger than a few numbers, hands out a copy.
    """

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on as if nothing had happened."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state; a KeyError or ValueError says what does not fit."""
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
    """Something that happened: at which step, and in which phase if in one."""

    kind: EventKind
    step: Step | None = None
    phase: str = ""


@port
class Listener(Protocol):
    """Hears of events. What it raises is logged and goes no further."""

    def on_event(self, event: Event) -> None: ...


@port
class Events(Protocol):
    """Tells listeners."""

    def emit(self, event: Event) -> None: ...


Value = float | bool | None
"""What is written down under a metric's name: a number, yes or no, or nothing that can be said."""


@attrs.frozen
class Accumulator:
    """
    A float64 tensor of fixed shape that is combined over ranks at each step.

    `of` says which ranks have a part in a sum: "data" is what replicas see differently, such as losses, and "model" is
    what they hold alike, such as norms of gradients, of which one replica's is taken.
    """

    op: Literal["sum", "max", "min"] = "sum"
    shape: tuple[int, ...] = ()
    of: Literal["data", "model"] = "data"

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
    """Keeps a series of metrics. It writes on the main rank only."""

    def track(self, step: int, values: Mapping[str, Value]) -> None:
        """Write down a step's values."""
        ...

    def rewind(self, step: int) -> None:
        """Forget what was written after this step: the run goes on from there."""
        ...


@port
class Durable(Protocol):
    """Writes something down that must not be gone when a later checkpoint is there."""

    def flush(self) -> None:
        """Return when all that was written is on the disk. It may be called in any thread."""
        ...


@port
class Restorer(Protocol):
    """Keeps the state of the run, and brings it back."""

    def restore(self) -> int:
        """Load the newest saved state into every stateful node; the step that it was saved after, 0 if none is."""
        ...

    def save(self, step: Step) -> None:
        """Save the state after a step, unless that is done already."""
        ...

    def staged(self) -> None:
        """Return when the state may change although it is being saved; all ranks call it before weights change."""
        ...


@port
class Randomness(Protocol):
    """Everything random of a run."""

    def stream(self, *purpose: str | int) -> torch.Generator:
        """A generator on the CPU that follows from the seed and this purpose alone."""
        ...


@port
class Stop(Protocol):
    """Whether somebody asked the run to end."""

    def agreed(self) -> int:
        """The number of the signal that any rank was sent, 0 if none was; all ranks call it, and learn the same."""
        ...


@port
class FinalTask(Protocol):
    """Something to do once, after the last step: whole or not at all, so that it can be tried again."""

    def is_finished(self) -> bool: ...

    def finish(self) -> None: ...


Cadence = int | Literal["last", "never"]


def due(cadence: Cadence, step: Step) -> bool:
    """Whether a step is one of those: each n-th and the last, the last only, or none."""
    if isinstance(cadence, int):
        return step.last or step.index % cadence == 0
    return cadence == "last" and step.last


def a_cadence(value: Cadence) -> str | None:
    """A check: a number of steps is at least 1."""
    return f"{value} steps is less than 1; 'never' turns it off" if isinstance(value, int) and value < 1 else None
