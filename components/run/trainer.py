"""The training loop: every step's phases, in order, and then the final tasks."""

import signal as signals
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any

import attrs

from drawloom import Every, NodeView, Ordered, Problem, above, at_least, component, internal, setting, wired
from drawloom.components.run.recipe_checks import check_training_recipe
from drawloom.ports import (
    AfterRestore,
    EpochCounter,
    Event,
    Events,
    FinalTask,
    Listener,
    Phase,
    PlannedPhase,
    Randomness,
    Restorer,
    SavingPhase,
    Step,
    Stop,
    StoppedError,
    StoppingPhase,
    count_steps_of_epochs,
    run_log,
)

if TYPE_CHECKING:
    from drawloom.components.run.skipped_steps import SkippedSteps


@component(opens_first="listeners")  # so that logs and timeouts cover the opening of the rest
class Trainer:
    """The training loop: every step's phases, in order, and then the final tasks."""

    phases: Ordered[Phase]
    listeners: list[Listener] = attrs.field(factory=list)
    events: Events
    stop: Stop
    randomness: Randomness
    checkpointer: Restorer | None = None
    restored: Every[AfterRestore]
    on_finish: list[FinalTask] = attrs.field(factory=list)
    epoch_counter: EpochCounter | None = wired(default=None)
    steps: int | None = setting("optimizer steps in the whole run", default=None, check=at_least(1), one_of="length")
    epochs: float | None = setting(
        "length in passes over the training rows, also fractions; they end within the last step",
        default=None,
        check=above(0),
        one_of="length",
    )
    max_skipped_steps: int = setting(
        "number of skipped steps in a row that stops the run", default=100, impact="safe", check=at_least(1)
    )

    _total: int = internal(attrs.Factory(lambda self: self.steps or 0, takes_self=True))
    _last_step: int = internal(0)
    _end_reason: str = internal("")
    _signal: int = internal(0)

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Report batch leaves and numbers without a writer, and lengths that do not fit the phases or the data."""
        yield from check_training_recipe(node)

    def run(self, *callbacks: Callable[[Step], object]) -> int:
        """
        Train from the newest checkpoint, or from the start, to the last step.

        Calls every callback after every step, as in a loop over `run_and_yield_steps`. Returns 0, or the stopping
        signal's number, such as SIGINT for Ctrl-C. A stopped run is saved, unless `checkpoint.every` is "never", and
        the same command resumes it.
        """
        for step in self.run_and_yield_steps() if callbacks else self._iterate_until_stopped(is_watched=False):
            for callback in callbacks:
                callback(step)
        return self._signal

    def run_and_yield_steps(self) -> Iterator[Step]:
        """
        Train like `run`, and yield every step after its phases.

        A call of the step's `stop` ends the run after the step, with a checkpoint and the final tasks; one rank's call
        is enough. If the loop is left early, the run is as after a kill: it resumes from its newest checkpoint.
        """
        return self._iterate_until_stopped(is_watched=True)

    def _iterate_until_stopped(self, *, is_watched: bool) -> Iterator[Step]:
        self._signal = 0
        try:
            yield from self._train_steps(is_watched=is_watched)
        except StoppedError as stopped:
            self._signal = stopped.signal

    def outcome(self) -> dict[str, Any]:
        """Return the last step and the reason of an early end, for programs."""
        return {"step": self._last_step, "steps": self._total, "stop_reason": self._end_reason}

    def _train_steps(self, *, is_watched: bool) -> Iterator[Step]:
        self.events.emit(Event("run_started"))
        done = self.checkpointer.restore() if self.checkpointer else 0
        self._call_after_restore_hooks(done)
        if self.epochs and self.epoch_counter:  # after restoring: it may change the batch size
            self._total = count_steps_of_epochs(self.epochs, self.epoch_counter)
        # a restored run may have ended before its last step
        reasons = (phase.stop_reason() for phase in self.phases if done and isinstance(phase, StoppingPhase))
        reason = next(filter(None, reasons), "")
        self._log_start(done, reason)
        self._last_step, self._end_reason = done, reason
        while done < self._total and not reason:
            step = self._make_step(done + 1)
            self._run_step(step)
            done, reason = (
                (self._go_back_to_newest_checkpoint(step), "") if step.goes_back else (step.index, step.stop_reason)
            )
            self._last_step, self._end_reason = done, reason
            yield step
            if is_watched and not reason and not step.goes_back and done < self._total:
                reason = self._end_reason = self._save_if_any_caller_stops(step)
        with self.stop.raise_stopped_error_on_signal():
            self._run_final_tasks(done)
        self.events.emit(Event("run_ended"))
        self._skipped.fail_if_last_step_skipped()

    def _save_if_any_caller_stops(self, step: Step) -> str:
        """Save the step if the caller's loop asked for a stop on any rank, and return the reason, or ""."""
        reason = self.stop.agree_on_reason(step.stop_reason)
        if reason:
            run_log.info("the run ends after step %d: %s", step.index, reason)
            if self.checkpointer:
                with self._emit_saving_events(step):
                    self.checkpointer.save(step)
        return reason

    def _log_start(self, done: int, reason: str) -> None:
        """Log the length in steps and epochs, and where the run resumes, or that it is finished."""
        if self.epoch_counter:
            epochs = f"{float(self._count_epochs_after(self._total)):,.4f}".rstrip("0").rstrip(".")
            run_log.info("length  %s steps, %s epochs", f"{self._total:,}", epochs)
        ended = done >= self._total or bool(reason)
        if ended and all(task.has_result_of_step(done) for task in self.on_finish):
            why = f"all {self._total} steps are done"
            if done > self._total:
                why = f"step {done} is done, and with it {why}"
            elif done < self._total:
                why = f"the run ended after step {done}: {reason}"
            run_log.info("finished: %s, there is nothing left to do", why)
        elif done:
            run_log.info("resuming after step %d", done)

    def _make_step(self, index: int) -> Step:
        step = Step(index, self._total)
        step.epochs = self._count_epochs_after(index - 1), self._count_epochs_after(index)
        if self.checkpointer:
            step.before_update = self.checkpointer.wait_until_staged
        return step

    def _count_epochs_after(self, step: int) -> Fraction:
        """Return the epochs after a step, or 0 if the data counts none."""
        return self.epoch_counter.count_epochs_after(step) if self.epoch_counter else Fraction()

    def _call_after_restore_hooks(self, done: int) -> None:
        for node in self.restored.values():
            node.after_restore(done)

    def _go_back_to_newest_checkpoint(self, step: Step) -> int:
        """Restore the newest checkpoint and return its step; return this step if there is no checkpoint."""
        with self._emit_saving_events(step):  # restoring may take as long as saving
            done = self.checkpointer.restore() if self.checkpointer else 0
            if done:
                self._call_after_restore_hooks(done)
                run_log.info("resuming after step %d", done)
            else:
                run_log.warning("there is no checkpoint to go back to: only step %d is skipped", step.index)
        return done or step.index

    def _run_final_tasks(self, last: int) -> None:
        """Run the final tasks, then raise the first common error of all ranks."""
        from drawloom.components.distributed.rank_errors import RankError

        errors = []
        for task in self.on_finish:
            try:
                if not task.has_result_of_step(last):
                    task.run_after_training(last)
            except RankError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _run_step(self, step: Step) -> None:
        self.events.emit(Event("step_started", step))
        for name, phase in zip(self.phases.names, self.phases, strict=True):
            self.events.emit(Event("phase_started", step, name))
            asked = step.stop_reason
            saves = isinstance(phase, SavingPhase) and phase.saves_after(step)
            with self._emit_saving_events(step) if saves else nullcontext():
                phase.run_phase(step)
            # The GPU computes this step's first phase while the host reads the numbers of the last step.
            self._skipped.wait_and_check_skip_limit()
            self._agree_to_stop_after_step(step, name, phase, asked)
            self.events.emit(Event("phase_ended", step, name))
        step.state.start_copying_to_host()
        self.events.emit(Event("step_ended", step))
        self._skipped.add_completed_step(step)
        if signal := self.stop.agree_on_signal():
            self._skipped.wait_and_check_skip_limit()
            self._save_and_stop(step, signal)
        if self.checkpointer:
            self.checkpointer.keep_in_memory_for_joiners(step)

    @cached_property
    def _skipped(self) -> "SkippedSteps":
        from drawloom.components.run.skipped_steps import SkippedSteps  # a check counts none

        return SkippedSteps(self.max_skipped_steps)

    def _agree_to_stop_after_step(self, step: Step, name: str, phase: Phase, before: str) -> None:
        """
        Make this step the last one on all ranks, if the phase has asked for a stop on any rank.

        `before` is an earlier phase's reason. Raises TypeError if the phase asks without being a StoppingPhase.
        """
        if isinstance(phase, StoppingPhase):
            step.stop_reason = "" if step.goes_back else self.stop.agree_on_reason(step.stop_reason)
            if step.stop_reason and not before:
                run_log.info("the run ends after step %d: %s", step.index, step.stop_reason)
        elif step.stop_reason != before:
            raise TypeError(f"[{name}] calls Step.stop, and has no method stop_reason; see the port StoppingPhase")

    @contextmanager
    def _emit_saving_events(self, step: Step) -> Iterator[None]:
        """Emit the events around a save, so the timeouts listener allows more time."""
        self.events.emit(Event("saving_started", step))
        try:
            yield
        finally:
            self.events.emit(Event("saving_ended", step))

    def _save_and_stop(self, step: Step, signal: int) -> None:
        """Save the step, unless the recipe saves none, log the signal, and raise StoppedError."""
        resumes = self.checkpointer is not None
        if self.checkpointer and not step.goes_back:  # a step that goes back resumes from its older checkpoint
            with self._emit_saving_events(step):
                resumes = self.checkpointer.save(step)
        self._last_step = step.index
        by = "Ctrl-C" if signal == signals.SIGINT else signals.Signals(signal).name
        then = "the same command resumes the run" if resumes else "the recipe saves no checkpoint"
        run_log.info("stopped by %s after step %d; %s", by, step.index, then)
        raise StoppedError(signal)

    @classmethod
    def resume_impact(cls, node: Any, key: str, before: Any) -> tuple[str, str] | None:
        """Return "safe" for another length, unless a phase such as a learning-rate schedule depends on it."""
        if key not in ("steps", "epochs"):
            return None
        planned = [phase for phase in node.neighbours("phases") if issubclass(phase.component, PlannedPhase)]
        derived = [f"[{phase.name}]" for phase in planned if phase.component.depends_on_total_steps(phase)]
        why = f"the values of {' and '.join(derived)} at each step follow from the number of all"
        return ("changes_training", why) if derived else ("safe", "")
