"""Header before a run's first step, and summary after its last step."""

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, ClassVar

from drawloom import Every, component, internal
from drawloom.ports import (
    Batching,
    DescribedStages,
    Device,
    EpochCounter,
    Event,
    EventKind,
    Mesh,
    Model,
    NodeState,
    PackedDataset,
    Precision,
    Processes,
    RunInfo,
    Step,
    ValidationData,
    run_log,
)

HIDDEN_FILES = {"run.lock", "export.workspace"}  # of no use to a person


@component(impact="safe")
class RunSummary:
    """
    Header with a run's parts, logged at the start, and summary with its results, logged at the end.

    `drawloom run --dry-run` prints the header without a run. Checkpoints contain the best validation loss, so a resumed
    run's summary covers the whole run; time and tokens count this process only.
    """

    observes: ClassVar[tuple[EventKind, ...]] = ("run_started", "phase_ended", "step_ended", "run_ended")

    job: RunInfo
    mesh: Mesh
    device: Device
    models: Every[Model]
    data: Every[PackedDataset]
    validation: Every[ValidationData]
    batching: Every[Batching]
    counters: Every[EpochCounter]
    precision: Every[Precision]
    launches: Every[Processes]
    stages: Every[DescribedStages]

    clock: Callable[[], float] = internal(time.monotonic)
    _began: float = internal(0.0)
    _first: int = internal(0)
    _last: int = internal(0)
    _tokens: int = internal(0)
    _newest: Step | None = internal(None)
    _best: dict[str, Any] = internal(factory=dict)

    def state_dict(self) -> NodeState:
        """Return `value` and `step` of the best validation loss and reward so far; empty without validation."""
        return dict(self._best)

    def load_state_dict(self, state: NodeState) -> None:
        self._best = dict(state)

    def preview(self) -> str:
        """Return the header, with one subject per line."""
        from drawloom.components.listeners.run_header import iterate_header_lines  # a check describes no run

        return "\n".join(f"{label:8}{text}" for label, text in iterate_header_lines(self))

    def on_event(self, event: Event) -> None:
        """Log the header when the run starts, count its steps, and log the summary when it ends."""
        if event.kind == "run_started":
            self._began = self.clock()
            run_log.info("%s", self.preview())
        elif event.kind == "phase_ended" and event.step is not None:
            # at the end of phases, because a later phase of the step may save a checkpoint
            # Keep the step's validation loss if it is the lowest, and its reward if it is the highest
            for name, best in (("validation_loss", min), ("validation_reward", max)):
                if name in event.step.state:
                    value, known = event.step.state.number(name), self._best.get(name)
                    if known is None or (value != known["value"] and best(value, known["value"]) == value):
                        self._best[name] = {"value": value, "step": event.step.index}
        elif event.kind == "step_ended" and event.step is not None:
            # Count the step's tokens; on a GPU one step later
            self._first, self._last = self._first or event.step.index, event.step.index
            before, self._newest = self._newest, event.step
            # On a GPU the host does not know this step's tokens yet, and does not wait for them.
            for ended in (before, event.step if event.step.is_last else None):
                self._tokens += ended.tokens if ended is not None else 0
        elif event.kind == "run_ended":
            run_log.info("%s", "\n".join(f"{label:8}{text}" for label, text in self._summary_lines()))

    def _summary_lines(self) -> Iterator[tuple[str, str]]:
        """Yield the summary as (subject, text): steps, tokens, speed, best loss and output files."""
        if self._last:
            seconds = self.clock() - self._began
            speed = f"{self._tokens / max(seconds, 1e-9):,.0f} tokens/s"
            steps = f"steps {self._first} to {self._last}"
            yield "trained", f"{steps} in {timedelta(seconds=round(seconds))}: {self._tokens:,} tokens, {speed} overall"
        for name, best in self._best.items():
            yield "best", f"{name.replace('_', ' ')} {best['value']:.4f} after step {best['step']}"
        folder = self.job.folder_path
        names = [path.name for path in folder.iterdir() if path.name not in HIDDEN_FILES] if folder.is_dir() else []
        yield "results", f"in {folder}: {', '.join(sorted(names))}"
