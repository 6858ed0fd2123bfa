"""The training loop."""

from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import attrs
import pytest
import torch

from drawloom.components.distributed.rank_errors import RankError
from drawloom.components.ports.run import Event, Step, StoppedError
from drawloom.components.run.trainer import Trainer
from drawloom.graph import Every, Ordered, RecipeError, UserError
from drawloom.graph.project import Recipe
from support.steps import LateState


@attrs.define
class Record:
    """A recorder of calls: a phase, restorer, final task, stop and event bus."""

    calls: list[str] = attrs.field(factory=list)
    restored: int = 0
    finished: int = 0
    signal_after: int = 0
    last: int = 0
    remembered: int = 0
    before_final_tasks: list[str] | None = None

    def run_phase(self, step: Step) -> None:
        self.last = step.index
        self.calls.append(f"phase {step.index}/{step.total}")

    def restore(self) -> int:
        return self.restored

    def after_restore(self, restored_step: int) -> None:
        self.calls.append(f"after restore of {restored_step}")

    def save(self, step: Step) -> bool:
        self.calls.append(f"save {step.index}")
        return True

    def saves_after(self, step: Step) -> bool:
        return False

    def wait_until_staged(self) -> None:
        self.calls.append("wait")

    def keep_in_memory_for_joiners(self, step: Step) -> None:
        self.remembered = step.index

    def has_result_of_step(self, step: int) -> bool:
        return self.finished == step

    def run_after_training(self, step: int) -> None:
        self.finished = step
        self.calls.append(f"finish {step}")

    def agree_on_signal(self) -> int:
        return 15 if self.signal_after and self.last >= self.signal_after else 0

    def agree_on_reason(self, reason: str) -> str:
        return reason

    def raise_stopped_error_on_signal(self) -> AbstractContextManager[None]:
        self.before_final_tasks = list(self.calls)
        return nullcontext()

    def emit(self, event: Event) -> None: ...

    def on_event(self, event: Event) -> None: ...

    def stream(self, *purpose: str | int) -> torch.Generator:
        return torch.Generator()


def trainer(record: Record, steps: int = 3, **changes: Any) -> Trainer:
    """Return a trainer with one record as every part."""
    parts: dict[str, Any] = {
        "events": record,
        "stop": record,
        "checkpointer": record,
        "on_finish": [record],
        "restored": Every(),
        **changes,
    }
    return Trainer(phases=Ordered([record], ["only"]), randomness=record, steps=steps, **parts)


def test_nodes_act_after_the_restore_and_before_the_first_step() -> None:
    """Every node with `after_restore` is called once, and not at all if the restore fails."""
    record = Record(restored=2)
    trainer(record, restored=Every({"folder": record})).run()
    assert record.calls == ["after restore of 2", "phase 3/3", "finish 3"]

    class Failing(Record):
        def restore(self) -> int:
            raise UserError("no valid checkpoint")

    failing = Failing()
    with pytest.raises(UserError):
        trainer(failing, restored=Every({"folder": failing})).run()
    assert failing.calls == []


def test_steps_count_from_one_to_the_last() -> None:
    """Every step runs the phases once; the final tasks run after the last."""
    record = Record()
    trainer(record).run()
    assert record.calls == ["phase 1/3", "phase 2/3", "phase 3/3", "finish 3"]


def test_a_resumed_run_starts_after_its_checkpoint() -> None:
    """No step is repeated or skipped."""
    record = Record(restored=2)
    trainer(record).run()
    assert record.calls == ["phase 3/3", "finish 3"]


@pytest.mark.parametrize(("restored", "calls"), [(3, []), (5, [])])
def test_a_finished_run_does_nothing(restored: int, calls: list[str]) -> None:
    """With all steps and final tasks done, nothing runs."""
    record = Record(restored=restored, finished=restored)
    trainer(record).run()
    assert record.calls == calls


def test_an_unfinished_final_task_is_repeated() -> None:
    """With all steps done but a final task missing, only the final task runs."""
    record = Record(restored=3)
    trainer(record).run()
    assert record.calls == ["finish 3"]


def test_final_tasks_of_an_earlier_step_are_repeated_after_more_steps() -> None:
    """A result made after step 2 does not count after step 3."""
    record = Record(restored=2, finished=2)
    trainer(record).run()
    assert record.calls == ["phase 3/3", "finish 3"]


def test_signals_raise_from_the_last_step_on() -> None:
    """Every step ends as a whole, and every final task can be interrupted."""
    record = Record(restored=2)
    trainer(record).run()
    assert record.before_final_tasks == ["phase 3/3"] and record.calls == ["phase 3/3", "finish 3"]


def test_a_signal_in_a_final_task_returns_its_number() -> None:
    """StoppedError, which no handler for Exception catches, interrupts the task; the caller of `run` sees none."""

    class Stopped(Record):
        def run_after_training(self, step: int) -> None:
            with suppress(Exception):
                raise StoppedError(2)

    record = Record(restored=3)
    assert trainer(record, on_finish=[Stopped(), record]).run() == 2 and record.calls == []


def test_a_final_task_that_fails_does_not_stop_the_next() -> None:
    """A failed export costs no sample; its error still ends the run."""

    class Failing(Record):
        def run_after_training(self, step: int) -> None:
            raise RankError("export exists already", 1, 0)

    record = Record(restored=3)
    with pytest.raises(RankError, match="export exists already"):
        trainer(record, on_finish=[Failing(), record]).run()
    assert record.calls == ["finish 3"]


def test_a_signal_stops_the_run_which_returns_its_number() -> None:
    """The current step is finished and saved; nothing is raised."""
    record = Record(signal_after=2)
    assert trainer(record).run() == 15 and record.calls == ["phase 1/3", "phase 2/3", "save 2"]


@attrs.define
class Skipping(Record):
    """Skips these steps."""

    which: set[int] = attrs.field(factory=set)
    late: bool = False

    def run_phase(self, step: Step) -> None:
        super().run_phase(step)
        if self.late:
            step.state = LateState()
        step.skip_update_if(torch.tensor(step.index in self.which), lambda: "the loss is nan")


late_or_not = pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])


@late_or_not
@pytest.mark.parametrize(
    ("skipped", "last"), [({2, 3, 4}, 4), ({1, 2, 4, 5, 7, 8, 9}, 9), ({1, 2, 4, 5, 7, 8}, 10), (set(), 10)]
)
def test_too_many_skipped_steps_in_a_row_stop_the_run(skipped: set[int], last: int, late: bool) -> None:
    """Three skipped steps in a row raise with the last reason; an applied step resets the count."""
    record = Skipping(which=skipped, late=late)
    run = trainer(record, steps=10, max_skipped_steps=3).run
    if last < 10:
        with pytest.raises(UserError, match=f"3 steps in a row were skipped, at last step {last}: the loss is nan;"):
            run()
    else:
        run()
    # The first phase of the next step gives a GPU something to do, while the host reads what the last one came to.
    assert record.last == last + (late and last < 10)


def test_a_late_skip_stops_the_run_before_weights_change_again() -> None:
    """The host learns it after the first phase of the next step, at whose end nothing is left to learn."""
    record = Skipping(which={2}, late=True)
    run = trainer(record, steps=4, max_skipped_steps=1)
    run.phases = Ordered([record, Updates(record.calls)], ["train", "update"])
    with pytest.raises(UserError, match="1 steps in a row were skipped, at last step 2"):
        run.run()
    changes = [call for call in record.calls if call != "wait"]
    assert changes == ["phase 1/4", "update 1", "phase 2/4", "update 2", "phase 3/4"]


@late_or_not
def test_a_run_that_ends_with_skipped_steps_fails_after_its_final_tasks(late: bool) -> None:
    """The final tasks run, as the weights are the last applied step's; then an error is raised."""
    record = Skipping(which={2, 4, 5}, late=late)
    words = "the last 2 steps were skipped, at last step 5: the loss is nan; the results are made from earlier weights"
    with pytest.raises(UserError, match=words):
        trainer(record, steps=5).run()
    assert record.calls[-1] == "finish 5"
    trainer(Skipping(which={2}), steps=5).run()


def test_events_surround_steps_and_phases() -> None:
    """Listeners get the run's events, steps and phases by name, in order."""
    kinds: list[str] = []

    class Bus(Record):
        def emit(self, event: Event) -> None:
            kinds.append(f"{event.kind} {event.phase}".strip())

    trainer(Record(), steps=1, events=Bus()).run()
    step = ["step_started", "phase_started only", "phase_ended only", "step_ended"]
    assert kinds == ["run_started", *step, "run_ended"]


@attrs.define
class Updates(Record):
    """A phase that updates weights, and saves in the steps `saved`; saves in `failing` steps fail."""

    saved: tuple[int, ...] = ()
    failing: int = 0

    def run_phase(self, step: Step) -> None:
        step.apply_update_unless_skipped(lambda _skip: self.calls.append(f"update {step.index}"))
        if step.index == self.failing:
            raise UserError("the disk is broken")

    def saves_after(self, step: Step) -> bool:
        return step.index in self.saved

    def emit(self, event: Event) -> None:
        if event.kind.startswith("saving"):
            self.calls.append(event.kind)


def test_an_update_waits_for_staging() -> None:
    """Every step waits before its update, so a save has copied the state before it changes."""
    record = Updates()
    trainer(record, steps=2, on_finish=[]).run()
    assert record.calls == ["wait", "update 1", "wait", "update 2"]


def test_events_surround_a_save() -> None:
    """Listeners see each save of a phase, also a failed one, and the save at which the run stops."""
    record = Updates(saved=(2,), failing=2)
    with pytest.raises(UserError, match="broken"):
        trainer(record).run()
    saving = ["saving_started", "saving_ended"]
    assert record.calls == ["wait", "update 1", saving[0], "wait", "update 2", saving[1]]
    stopped = Updates(signal_after=0)
    stopped.last = stopped.signal_after = 1
    trainer(stopped).run()
    assert stopped.calls == ["wait", "update 1", saving[0], "save 1", saving[1]]


@attrs.define
class GoesBack(Record):
    """A phase for going back at a step, the first time."""

    at: int = 3

    def run_phase(self, step: Step) -> None:
        super().run_phase(step)
        if step.index == self.at:
            self.at, self.restored = 0, 1
            step.goes_back = True
            step.skip("a spike")


@pytest.mark.parametrize("at", [3, 4])
def test_a_run_goes_back_to_a_checkpoint_and_continues(at: int) -> None:
    """Nodes act after the restore, too; also from the last step, and with a signal nothing is saved first."""
    record = GoesBack(at=at)
    trainer(record, steps=4, restored=Every({"folder": record})).run()
    phases = [f"phase {index}/4" for index in range(1, 5)]
    calls = [call for call in record.calls if call != "wait"]
    assert calls == ["after restore of 0", *phases[:at], "after restore of 1", *phases[1:], "finish 4"]
    stopped = GoesBack(at=2, signal_after=2)
    assert trainer(stopped).run() == 15
    assert not any(call.startswith("save") for call in stopped.calls)


def test_without_a_checkpoint_a_step_that_goes_back_is_skipped_alone() -> None:
    """There is nothing to go back to before the first checkpoint: the run continues with the next step."""
    record = GoesBack(at=2)
    trainer(record, checkpointer=None).run()
    assert record.calls == ["phase 1/3", "phase 2/3", "phase 3/3", "finish 3"]


def test_listeners_open_before_the_phases() -> None:
    """Logs and timeouts cover the opening of data and model: only a listener's dependencies open before it."""
    graph = Recipe.load("first_run").graph
    order = graph.topological_order(["trainer"])
    listeners = graph.nodes["trainer"].edges["listeners"].targets
    needed = set(graph.topological_order(listeners))
    assert next(iter(graph.nodes["trainer"].edges)) == "phases"
    assert set(order[: len(needed)]) == needed > set(listeners)
    assert {"forward_backward", "executor", "stages", "data"}.isdisjoint(needed)


def test_a_best_checkpoint_needs_a_numeric_output_of_a_phase() -> None:
    """A checkpoint chosen by any other output would never be kept; the problem suggests numbers, which are accepted."""
    with pytest.raises(RecipeError, match=r"no phase of \[trainer\] writes a number 'validation_los'; did you mean"):
        Recipe.load("first_run", "checkpoint.best=validation_los").check()
    numbers = (
        "grad_norm",
        "initial_validation_loss",
        "loss",
        "loss_weight",
        "lr",
        "lr_factor",
        "skip",
        "tokens",
        "validation_cross_entropy",
        "validation_loss",
    )
    for name in ("batches", "gradients", "local_gradients", "losses", "weights"):
        with pytest.raises(
            RecipeError, match=f"number '{name}'; (available: {', '.join(numbers)}|did you mean '(loss|loss_weight)')"
        ):
            Recipe.load("first_run", f"checkpoint.best={name}").check()
    for name in numbers:
        Recipe.load("first_run", f"checkpoint.best={name}").check()


@pytest.mark.parametrize("words", [["evaluate.every=never"], ["edit.trainer.phases.remove=['@evaluate']"]])
def test_a_best_checkpoint_by_an_unwritten_number_is_warned_of(words: list[str]) -> None:
    """Without an evaluation, or with one that never runs, there is no validation loss to choose the best checkpoint."""
    text = "no phase of [trainer] writes a number 'validation_loss', so that 'best' does nothing"
    warned = [problem.text for problem in Recipe.load("first_run", *words).check()]
    assert text in warned
    assert text not in [problem.text for problem in Recipe.load("first_run", "evaluate.every=last").check()]


@attrs.define
class Stopping(Record):
    """A phase that asks for a stop in step 2, unless `goes_back`; another rank asks in step `other`."""

    other: int = 0
    goes_back: bool = False
    ended: bool = False
    seen: list[bool] = attrs.field(factory=list)

    def run_phase(self, step: Step) -> None:
        super().run_phase(step)
        step.goes_back = self.goes_back and step.index == 2
        if step.index == 2 and not self.other:
            step.stop("enough")

    def agree_on_reason(self, reason: str) -> str:
        return reason or ("the other rank has enough" if self.last == self.other else "")

    def stop_reason(self) -> str:
        return "enough" if self.ended else ""

    def emit(self, event: Event) -> None:
        if event.kind == "step_ended" and event.step is not None:
            self.seen.append(event.step.is_last)


@pytest.mark.parametrize(("other", "last"), [(0, 2), (1, 1)])
def test_a_phase_ends_the_run_on_all_ranks(other: int, last: int) -> None:
    """If any rank asks for a stop, the run ends with this step: it is the last, and final tasks follow."""
    record = Stopping(other=other)
    assert trainer(record).run() == 0
    assert record.seen == [False] * (last - 1) + [True]
    assert record.calls[-2:] == [f"phase {last}/3", f"finish {last}"]


def test_an_ended_run_trains_no_further() -> None:
    """If a phase ended the run before a restart, it is asked before the first step; only missing tasks run."""
    for finished, calls in ((2, []), (0, ["finish 2"])):
        record = Stopping(restored=2, finished=finished, ended=True)
        trainer(record).run()
        assert record.calls == calls


def test_a_step_that_goes_back_does_not_end_the_run() -> None:
    """The step is repeated or skipped, so a stop in it does not count."""
    record = Stopping(goes_back=True)
    trainer(record, checkpointer=None).run()
    assert record.calls[-2:] == ["phase 3/3", "finish 3"]


def test_only_a_stopping_phase_may_end_the_run() -> None:
    """Other ranks would not know of a stop by a phase after which they do not agree."""

    class Undeclared(Record):
        def run_phase(self, step: Step) -> None:
            step.stop("enough")

    with pytest.raises(TypeError, match=r"\[only\] calls Step.stop, and has no method stop_reason"):
        trainer(Undeclared()).run()


@pytest.mark.parametrize("stopped_at", [0, 2])
def test_steps_can_be_watched_and_the_run_stopped(stopped_at: int) -> None:
    """Every step is yielded after its phases; `stop` saves it and runs the final tasks, and no phase follows."""
    record = Record()
    watched = []
    training = trainer(record)
    for step in training.run_and_yield_steps():
        watched.append((step.index, record.calls[-1]))
        if step.index == stopped_at:
            step.stop("enough")
    last = stopped_at or 3
    assert watched == [(index, f"phase {index}/3") for index in range(1, last + 1)]
    assert record.calls[-1] == f"finish {last}" and (f"save {stopped_at}" in record.calls) == bool(stopped_at)
    assert training.outcome() == {"step": last, "steps": 3, "stop_reason": "enough" if stopped_at else ""}


def test_callbacks_are_functions_of_a_step() -> None:
    """They are called in order after every step; without any, `run` is the same."""
    calls: list[tuple[str, int]] = []
    code = trainer(Record()).run(
        lambda step: calls.append(("a", step.index)), lambda step: calls.append(("b", step.index))
    )
    assert code == 0 and calls == [("a", 1), ("b", 1), ("a", 2), ("b", 2), ("a", 3), ("b", 3)]
    assert trainer(Record(), steps=5).run() == 0


def test_the_last_layer_decides_between_steps_and_epochs() -> None:
    """A later length replaces an earlier one in the other unit, and a trainer needs one."""
    base = Recipe.load("first_run", "trainer.epochs=2")
    lengths = [
        (nodes["trainer"].settings["steps"], nodes["trainer"].settings["epochs"])
        for recipe in (base, base.with_values({"trainer": {"steps": 5}}), Recipe.load("first_run"))
        for nodes in [recipe.graph.nodes]
    ]
    assert lengths == [(None, 2.0), (5, None), (240, None)]
    with pytest.raises(RecipeError, match="neither steps nor epochs is set"):
        base.with_values({"unset": ["trainer.epochs", "trainer.steps"]}).check(skip_machine_checks=True)
