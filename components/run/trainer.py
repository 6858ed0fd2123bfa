"""The loop."""

import logging
from typing import Any

import attrs

from drawloom.components.ports.run import Event, Events, FinalTask, Listener, Phase, Randomness, Restorer, Step, Stop
from drawloom.graph import Ordered, UserError, at_least, component, setting
from drawloom.graph.component import Traits

log = logging.getLogger("drawloom.run")


@component
class Trainer:
    """Takes every step through the phases, in their order; then finishes what is left to do once."""

    listeners: list[Listener] = attrs.field(
        factory=list
    )  # first, so that what they need to hear and tell is open first
    phases: Ordered[Phase]
    events: Events
    stop: Stop
    randomness: Randomness
    checkpointer: Restorer | None = None
    on_finish: list[FinalTask] = attrs.field(factory=list)
    steps: int = setting(check=at_least(1), doc="optimizer steps in the whole run")
    max_skipped_steps: int = setting(
        default=100, impact="safe", check=at_least(1), doc="steps that may be refused in a row before the run stops"
    )

    _refused: int = attrs.field(init=False, default=0)

    def run(self) -> None:
        """Go on from where the run was, to its end."""
        self.events.emit(Event("run_started"))
        done = self.checkpointer.restore() if self.checkpointer else 0
        if done >= self.steps and all(finisher.is_finished() for finisher in self.on_finish):
            log.info("finished: all %d steps are done, there is nothing left to do", self.steps)
        elif done:
            log.info("going on after step %d", done)
        for index in range(done + 1, self.steps + 1):
            self._take(Step(index, self.steps))
        for finisher in self.on_finish:
            if not finisher.is_finished():
                finisher.finish()
        self.events.emit(Event("run_ended"))

    def _take(self, step: Step) -> None:
        self.events.emit(Event("step_started", step))
        for name, phase in zip(self.phases.names, self.phases, strict=True):
            self.events.emit(Event("phase_started", step, name))
            if self.checkpointer and changes_weights(phase):
                self.checkpointer.staged()
            phase.run_phase(step)
            self.events.emit(Event("phase_ended", step, name))
        self.events.emit(Event("step_ended", step))
        self._count_refused(step)
        if signal := self.stop.agreed():
            self._stop(step, signal)

    def _count_refused(self, step: Step) -> None:
        """Stop a run in which nothing is learned any more. All ranks refuse the same steps."""
        self._refused = self._refused + 1 if step.skip_reason else 0
        if self._refused >= self.max_skipped_steps:
            raise UserError(
                f"{self._refused} steps in a row were skipped, at last step {step.index}: {step.skip_reason}; to go "
                "back, remove the checkpoints that were saved since (the newest with a finite loss is always kept), "
                "lower the learning rate or clip more, and start the run again"
            )

    def _stop(self, step: Step, signal: int) -> None:
        if self.checkpointer:
            self.checkpointer.save(step)
        log.info("stopped by signal %d after step %d; the same command goes on from there", signal, step.index)
        raise SystemExit(128 + signal)

    @classmethod
    def resume_impact(cls, node: Any, key: str) -> str | None:
        """More or fewer steps are safe, as long as no phase derives anything from how many there are."""
        if key != "steps":
            return None
        derived = [phase for phase in node.neighbours("phases") if _derives(phase)]
        return "changes_training" if derived else "safe"


def changes_weights(phase: Phase) -> bool:
    """Whether a phase says that it does."""
    traits: Traits | None = getattr(phase, "__component__", None)
    return traits is not None and "weights" in (*traits.flow.writes, *traits.flow.changes)


def _derives(phase: Any) -> bool:
    """Whether a phase's component says that it derives something from the number of steps."""
    derives = getattr(phase.component, "derives_from_total", None)
    return bool(derives and derives(phase))
