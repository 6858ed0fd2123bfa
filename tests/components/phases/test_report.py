"""Reports to trackers, and the step line."""

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, ClassVar

import attrs
import pytest
import torch
from torch import Tensor

from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.phases.report import Report
from drawloom.components.phases.step_reports import format_step_line, reduce_metrics_over_ranks, split_metric_totals
from drawloom.components.ports.run import Step
from drawloom.components.ports.tracking import Accumulator, Histogram, Value
from drawloom.graph import ResolvedRecipe, UserError
from drawloom.graph.project import Recipe
from support.steps import LateState, make_skipped_step


@attrs.frozen
class Fixed:
    """A metric with constant values."""

    values: dict[str, Value]
    accumulators: ClassVar[Mapping[str, Accumulator]] = {}

    def measure_on_rank(self, step: Step) -> Mapping[str, Tensor]:
        return {}

    def compute(self, totals: Mapping[str, Tensor], step: Step) -> Mapping[str, Value]:
        return self.values


def report_of(mesh: Any, **parts: Any) -> Report:
    """Return a report on one rank, on a CPU."""
    return Report(mesh=mesh, device=ComputeDevice(kind="cpu"), **parts)


@attrs.define
class Recorder:
    """A recorder of tracker calls."""

    calls: list[Any] = attrs.field(factory=list)

    def track(self, step: int, values: Mapping[str, Value]) -> None:
        self.calls.append((step, list(values.items())))

    def rewind(self, step: int) -> None:
        self.calls.append(f"rewind {step}")


def test_every_tracker_gets_all_metrics_of_every_step(one_rank: Any) -> None:
    """Values come in the order of the metrics; trackers rewind once, before the first step of a process."""
    trackers = [Recorder(), Recorder()]
    report = report_of(
        one_rank, metrics=[Fixed({"a": 1.0, "b": None}), Fixed({"c": 3})], trackers=[*trackers], every="never"
    )
    report.run_phase(Step(8, 9))
    report.run_phase(Step(9, 9))
    values = [("a", 1.0), ("b", None), ("c", 3)]
    assert [tracker.calls for tracker in trackers] == [["rewind 7", (8, values), (9, values)]] * 2


@attrs.frozen
class CountsOne:
    """A metric whose only sum is 1 on every rank."""

    scope: Any
    op: Any = "sum"

    @property
    def accumulators(self) -> Mapping[str, Accumulator]:
        return {"one": Accumulator(self.op, scope=self.scope)}

    def measure_on_rank(self, step: Step) -> Mapping[str, Tensor]:
        return {"one": torch.ones(())}

    def compute(self, totals: Mapping[str, Tensor], step: Step) -> Mapping[str, Value]:
        return {"one": float(totals["one"])}


@pytest.mark.parametrize(
    ("indices", "microbatches", "counted"),
    [
        ({}, None, "activations data rows"),
        ({"pipeline": 1}, None, "activations"),
        ({"pipeline": 1}, 2, "activations data rows"),
        ({}, 0, "activations"),
        ({"tensor": 1}, 2, "activations"),
        ({"context": 1}, 2, "activations data"),
    ],
)
def test_ranks_with_the_same_batches_count_once(
    mesh_of: Any, indices: Mapping[str, int], microbatches: int | None, counted: str
) -> None:
    """Among ranks with the same batches the one with losses contributes to sums; a maximum has every rank's value."""
    mesh = mesh_of(sizes=dict.fromkeys(indices, 2), indices=indices)
    step = Step(1, 1, {} if microbatches is None else {"losses": {"weight": torch.ones(microbatches), "sums": {}}})
    scopes = "activations", "data", "rows"
    metrics = [*(CountsOne(scope) for scope in scopes), CountsOne("rows", "max")]
    reduce_metrics_over_ranks(metrics, step, mesh, ComputeDevice(kind="cpu"))
    totals = [float(totals["one"]) for totals in split_metric_totals(metrics, step)]
    assert totals == [*(float(scope in counted) for scope in scopes), 1.0]


def test_an_evaluation_before_the_first_step_is_step_0(one_rank: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Trackers get it before step 1, under later evaluations' names, and forget an earlier start's measurements."""
    caplog.set_level(logging.INFO)
    tracker = Recorder()
    report = report_of(one_rank, metrics=[Fixed({"a": 1.0})], trackers=[tracker])
    report.run_phase(Step(1, 9, {"initial_validation_loss": 5.5}))
    assert tracker.calls == ["rewind -1", (0, [("validation_loss", 5.5)]), (1, [("a", 1.0)])]
    assert caplog.messages == ["step 0/9  validation loss 5.5000", "step 1/9"]


def test_a_step_is_logged_as_one_line(one_rank: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The whole line is logged at INFO, to the logger shown in the terminal."""
    caplog.set_level(logging.INFO)
    values = {"loss": 2.34561, "grad_norm": 0.834, "lr": 0.003, "tokens": 7, "tokens_per_second": 12345.4}
    report_of(one_rank, metrics=[Fixed({**values, "memory": 512_400_000})]).run_phase(Step(12, 300))
    line = "step 12/300  loss 2.3456  grad_norm 0.83  lr 0.0030  12,345 tokens/s  512 MB"
    assert caplog.record_tuples == [("drawloom.run", logging.INFO, line)]


def test_a_line_has_only_measured_values() -> None:
    """Without metrics there is only the step; the validation loss follows the loss; unknown metrics are not shown."""
    step = Step(1, 2)
    assert format_step_line(step, {}) == "step 1/2"
    assert (
        format_step_line(step, {"x": 1.0, "validation_loss": 2.1, "loss": 3.0})
        == "step 1/2  loss 3.0000  validation loss 2.1000"
    )


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.0, "0.0"), (0.00123, "0.0012"), (0.099, "0.099"), (0.1, "0.10"), (12.345, "12.35"), (float("inf"), "inf")],
)
def test_a_small_norm_keeps_two_digits(number: float, text: str) -> None:
    """A norm of a thousandth is not shown as zero, nor a large one with an exponent."""
    assert format_step_line(Step(1, 1), {"grad_norm": number}) == f"step 1/1  grad_norm {text}"


def test_a_skipped_step_is_a_warning_at_any_cadence(one_rank: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The warning has the reason and replaces the line; trackers get the step as usual."""
    caplog.set_level(logging.INFO)
    tracker = Recorder()
    report_of(one_rank, metrics=[Fixed({"loss": None})], trackers=[tracker], every="never").run_phase(
        make_skipped_step(2, 3, "loss nan")
    )
    assert caplog.record_tuples == [("drawloom.run", logging.WARNING, "step 2/3 skipped: loss nan")]
    assert tracker.calls == ["rewind 1", (2, [("loss", None)])]


def test_lines_are_logged_at_the_cadence(one_rank: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Every third step, a process's first step, steps with a validation loss and the last have a line."""
    caplog.set_level(logging.INFO)
    validated = attrs.evolve(Fixed({}), values={"validation_loss": 2.0})
    report = report_of(one_rank, every=3)
    for index in range(1, 9):
        report.metrics = [validated] if index == 5 else []
        report.run_phase(Step(index, 8, started=0.0))
    lines = ["step 1/8", "step 3/8", "step 5/8  validation loss 2.0000", "step 6/8", "step 8/8"]
    assert caplog.messages == lines
    caplog.clear()
    for cadence in ("last", "never"):
        report_of(one_rank, every=cadence).run_phase(Step(1, 2))
    assert caplog.messages == []


def test_the_time_left_follows_from_the_steps_after_the_first(one_rank: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A process's first step, which compiles, does not count; 10 s a step leave 40 s after step 96 of 100."""
    caplog.set_level(logging.INFO)
    report = report_of(one_rank, every=1)
    for index, started in ((93, 0.0), (94, 500.0), (95, 510.0), (96, 520.0)):
        report.run_phase(Step(index, 100, started=started))
    assert caplog.messages == ["step 93/100", "step 94/100", "step 95/100  0:00:50 left", "step 96/100  0:00:40 left"]


def test_a_tracker_that_fails_is_dropped(one_rank: Any, caplog: pytest.LogCaptureFixture) -> None:
    """It is not called again, and the message says why; the others get every value."""

    class Broken(Recorder):
        def track(self, step: int, values: Mapping[str, Value]) -> None:
            super().track(step, values)
            raise OSError(28, "No space left on device")

    broken, fine = Broken(), Recorder()
    report = report_of(one_rank, metrics=[Fixed({"a": 1.0})], trackers=[broken, fine], every="never")
    for index in (1, 2, 3):
        report.run_phase(Step(index, 9))
    assert broken.calls == ["rewind -1", (1, [("a", 1.0)])]
    assert fine.calls == ["rewind -1", *((index, [("a", 1.0)]) for index in (1, 2, 3))]
    assert [record.getMessage() for record in caplog.records] == [
        "Broken failed and gets no more values, the run continues: OSError: [Errno 28] No space left on device"
    ]


def test_a_late_step_is_written_once_with_the_next_or_before_a_checkpoint(one_rank: Any) -> None:
    """On a GPU the host waits for a step's numbers when the next one is measured, or earlier if they are flushed."""
    tracker = Recorder()
    reports = report_of(one_rank, metrics=[Fixed({"a": 1.0})], trackers=[tracker], every="never")
    seen: list[tuple[list[int], list[bool]]] = []
    late_steps: list[Step] = []

    def run(index: int) -> None:
        late_steps.append(Step(index, 9, LateState({"loss": torch.tensor(1.0)})))
        reports.run_phase(late_steps[-1])
        note()

    def note() -> None:
        steps = [call[0] for call in tracker.calls if not isinstance(call, str)]
        seen.append((steps, [step.state.is_on_host for step in late_steps]))

    for index in (1, 2, 3):
        run(index)
    reports.flush()
    note()
    run(9)
    reports.close()
    assert seen == [
        ([], [False]),
        ([1], [True, False]),
        ([1, 2], [True, True, False]),
        ([1, 2, 3], [True, True, True]),
        ([1, 2, 3, 9], [True, True, True, True]),
    ]
    assert len(tracker.calls) == 5


@attrs.define
class Rich(Recorder):
    """A tracker with every capability."""

    def store_properties(self, properties: Mapping[str, Any]) -> None:
        self.calls.append(("describe", dict(properties)))

    def track_in_context(self, step: int, values: Mapping[str, Value], context: Mapping[str, str]) -> None:
        self.calls.append((step, dict(values), dict(context)))

    def track_distributions(self, step: int, distributions: Mapping[str, Histogram]) -> None:
        self.calls.append((step, dict(distributions)))


@attrs.frozen
class Drawn(Fixed):
    """A metric with a constant histogram beside its values."""

    def distributions(self, totals: Mapping[str, Tensor], step: Step) -> Mapping[str, Histogram]:
        return {"weights/a": FLAT}


FLAT = Histogram(0.0, 1.0, (1.0, 1.0))


def test_a_tracker_gets_the_values_it_declares(one_rank: Any) -> None:
    """Properties once, before the first rewind; values by context; histograms. Another tracker gets plain values."""
    rich, plain = Rich(), Recorder()
    metrics = [Drawn({"loss": 1.0, "validation_loss": 2.0})]
    recipe = ResolvedRecipe("[optimizer]\nlr = 0.5\n", "hash")
    report = report_of(one_rank, metrics=metrics, trackers=[rich, plain], every="never", recipe=recipe)
    report.run_phase(Step(1, 2))
    report.run_phase(Step(2, 2))
    of_step = [({"loss": 1.0}, {"phase": "train"}), ({"loss": 2.0}, {"phase": "validation"}), ({"weights/a": FLAT},)]
    assert rich.calls == [
        ("describe", {"optimizer": {"lr": 0.5}}),
        "rewind -1",
        *((step, *call) for step in (1, 2) for call in of_step),
    ]
    values = [("loss", 1.0), ("validation_loss", 2.0)]
    assert plain.calls == ["rewind -1", (1, values), (2, values)]


def test_check_warns_of_distributions_that_no_tracker_takes() -> None:
    """With the tracker of JSON lines alone, whether the metric is in a group or not; TensorBoard takes them."""
    phases = """edit.trainer.phases.before={'@optimizer'="@metrics.shapes"}"""
    words = ("metrics.shapes.use=metrics.histograms", "metrics.shapes.targets=['*']", phases)
    [warning] = [
        problem.text for problem in Recipe.load("first_run", *words).check() if "distributions" in problem.text
    ]
    assert "no tracker takes the distributions of [metrics.shapes]" in warning
    taken = Recipe.load("first_run", *words, "trackers.tensorboard.use=trackers.tensorboard").check()
    assert not [problem.text for problem in taken if "distributions" in problem.text]


@attrs.frozen
class BreakableGroup:
    """A group whose ranks may be lost; nothing is summed."""

    is_broken: bool
    rank: ClassVar[int] = 0
    may_break: ClassVar[bool] = True

    def wait_and_raise_if_broken(self) -> None:
        if self.is_broken:
            raise UserError("rank 1 is gone")


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_step_that_may_be_lost_is_tracked_at_once_or_never(one_rank: Any, is_broken: bool) -> None:
    """If ranks may be lost, a step does not wait until its numbers are on the host; after a loss they are wrong."""
    tracker, mesh = Recorder(), attrs.evolve(one_rank, world=BreakableGroup(is_broken))
    report = report_of(mesh, metrics=[Fixed({"a": 1.0})], trackers=[tracker])
    step = Step(2, 9, state=LateState({"loss": torch.tensor(1.0)}))
    with pytest.raises(UserError, match="rank 1 is gone") if is_broken else nullcontext():
        report.run_phase(step)
    report.close()
    assert tracker.calls == ["rewind 1", *([] if is_broken else [(2, [("a", 1.0)])])]
