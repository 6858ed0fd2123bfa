"""Records: a rank's numbers, gradients and weights after every phase."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from drawloom.components.phases.report import Report
from drawloom.components.phases.step_reports import split_metric_totals
from drawloom.graph.component import find_declared_reads_and_writes
from drawloom.ports import (
    IN_PARAMETERS,
    LOSSES,
    METRIC_TOTALS,
    Event,
    EventKind,
    Mesh,
    Parameters,
    PerDimension,
    Phase,
    Step,
    TensorSlice,
    Value,
)

GRADIENT = "the gradient of "
"""Start of the names of gradients."""
LARGEST = "largest_"
"""Start of the names of a loss's maxima, which are not added up."""


@attrs.frozen
class RankPiece:
    """A rank's part of a tensor, and where it is in the whole one; None for a whole tensor."""

    tensor: Tensor
    tensor_slice: TensorSlice | None = None


@attrs.frozen
class PhaseSnapshot:
    """
    A rank's values after a phase of a step.

    `parts` are added up over ranks with other tokens or layers, and are equal along `tensor`. `numbers` are equal on
    every rank; metrics may add up float32. `pieces` are gradients and weights.
    """

    step: int
    phase: str
    parts: Mapping[str, Tensor]
    numbers: Mapping[str, Tensor]
    pieces: Mapping[str, RankPiece]


@attrs.define
class RankRecord:
    """A rank's mesh indices, its snapshots in order, and its exported tensors."""

    indices: PerDimension
    snapshots: list[PhaseSnapshot] = attrs.field(factory=list)
    exported: dict[str, Tensor] = attrs.field(factory=dict)


@attrs.define(eq=False)
class RecordTracker:
    """Tracker with the newest values, for the recorder."""

    values: dict[str, Tensor] = attrs.field(factory=dict)

    def track(self, step: int, values: Mapping[str, Value]) -> None:
        self.values |= {
            f"metric {name}": _to_tensor(value).float() for name, value in values.items() if value is not None
        }

    def rewind(self, step: int) -> None:
        """Do nothing: a record is made in one process."""


@attrs.define(eq=False)
class ProofRecorder:
    """
    Listener for copying the values written by every phase.

    It keeps its own error, because events hide errors.
    """

    observes: ClassVar[tuple[EventKind, ...]] = ("step_started", "phase_ended")

    tracker: RecordTracker = attrs.field(factory=RecordTracker)
    nodes: Mapping[str, Any] = attrs.field(factory=dict)
    record: RankRecord = attrs.field(factory=lambda: RankRecord(PerDimension.of_first_rank()))
    has_started: bool = False
    error: Exception | None = None
    _parameters: Any = None

    def start(self, nodes: Any, noise: float, seed: int) -> None:
        """Remember the run's open nodes, and multiply weights by random numbers as near to 1 as `noise`."""
        self.nodes, self._parameters = dict(nodes), nodes.get(Parameters)
        self.record.indices = nodes.get(Mesh).indices
        generator = torch.Generator().manual_seed(seed)
        for _, parameter in self._parameters.named_parameters() if noise else ():
            factors = 1 + noise * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.detach().mul_(factors)

    def on_event(self, event: Event) -> None:
        self.has_started = True
        if event.kind == "phase_ended" and event.step is not None and self.error is None:
            try:
                self.record.snapshots.append(self._take_snapshot(event.step, event.phase))
            except Exception as error:
                self.error = error

    def _take_snapshot(self, step: Step, phase: str) -> PhaseSnapshot:
        node: Phase = self.nodes[phase]
        flow = find_declared_reads_and_writes(node)
        written = {*flow.writes, *flow.changes}
        parts: dict[str, Tensor] = {}
        if LOSSES in written:
            losses = step.state[LOSSES]
            named = {"the sum of losses": losses["loss"], "the sum of weights": losses["weight"]}
            sums = {name: value for name, value in losses["sums"].items() if not name.startswith(LARGEST)}
            named |= {f"the sum of {name}": value for name, value in sums.items()}
            parts = {name: value.double().sum(0).to(value.dtype) for name, value in named.items()}
        numbers = self.tracker.values | dict(self._iterate_numbers(step, written))
        self.tracker.values = {}
        if isinstance(node, Report):
            for metric, totals in zip(node.metrics, split_metric_totals(node.metrics, step), strict=True):
                name = next(name for name, item in self.nodes.items() if item is metric)
                numbers |= {f"the total {key} of [{name}]": total.float() for key, total in totals.items()}
        return PhaseSnapshot(step.index, phase, parts, numbers, dict(self._iterate_pieces(written)))

    def _iterate_numbers(self, step: Step, written: set[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the single numbers among a phase's written values."""
        for name in sorted(written - IN_PARAMETERS - {LOSSES, METRIC_TOTALS}):
            value = step.state.get(name)
            if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
                yield name, _to_tensor(value)

    def _iterate_pieces(self, written: set[str]) -> Iterator[tuple[str, RankPiece]]:
        """Yield copies of the gradients and weights written by a phase."""
        slices = self._parameters.parameter_slices()
        for name, parameter in self._parameters.named_parameters():
            if "gradients" in written and parameter.grad is not None:
                yield GRADIENT + name, RankPiece(parameter.grad.detach().clone(), slices[name])
            if "weights" in written:
                yield name, RankPiece(parameter.detach().clone(), slices[name])


def _to_tensor(value: Any) -> Tensor:
    """Return a number as a float64 tensor ()."""
    return torch.as_tensor(value).detach().double().reshape(()).clone()
