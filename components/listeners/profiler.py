"""torch.profiler traces of chosen steps."""

import logging

import attrs
import torch
from torch.profiler import ProfilerActivity, profile

from drawloom.components.ports.distributed import Mesh
from drawloom.components.ports.run import Event, RunFolder, Step
from drawloom.components.storage.regular_file import make_folder
from drawloom.graph import component, setting

log = logging.getLogger("drawloom.run")


def _are_steps(steps: list[int]) -> str | None:
    low = [step for step in steps if step < 1]
    return f"there is no step {low[0]}; the first is 1" if low else None


@component(impact="safe")
class Profiler:
    """
    `traces/step-N-rank-R.json.gz` in the run folder, for chrome://tracing or ui.perfetto.dev.

    A profiler that fails is turned off, with one warning.
    """

    folder: RunFolder
    mesh: Mesh
    steps: list[int] = setting(check=_are_steps, doc="the steps to trace, from 1")

    _running: profile | None = attrs.field(init=False, default=None)
    _off: bool = attrs.field(init=False, default=False)

    def close(self) -> None:
        """Discard an unfinished trace."""
        running, self._running = self._running, None
        if running is not None:
            running.stop()

    def on_event(self, event: Event) -> None:
        """Start and stop the profiler with a chosen step."""
        if event.step is None or event.step.index not in self.steps or self._off:
            return
        try:
            self._trace(event.kind, event.step)
        except Exception as error:
            self._off = True
            log.warning("no more traces: the profiler failed at step %d: %s", event.step.index, error)

    def _trace(self, kind: str, step: Step) -> None:
        if kind == "step_started":
            # without acc_events, torch 2.11 warns that it drops the events of earlier cycles
            running = profile(activities=_activities(), acc_events=True)
            running.start()
            self._running = running
        elif kind == "step_ended" and self._running is not None:
            running, self._running = self._running, None
            running.stop()
            self._write(running, step)

    def _write(self, done: profile, step: Step) -> None:
        path = make_folder(self.folder.folder / "traces") / f"step-{step.index}-rank-{self.mesh.world.rank}.json.gz"
        path.unlink(missing_ok=True)  # torch would write through a link
        done.export_chrome_trace(str(path))


def _activities() -> list[ProfilerActivity]:
    gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    return [ProfilerActivity.CPU, *gpu]
