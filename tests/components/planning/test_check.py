"""Plans compared with runs."""

import re
from pathlib import Path

import pytest

from drawloom.components.distributed.device_model import find_device_model
from drawloom.components.planning.check import PLAN, compare_with_plan
from drawloom.components.planning.plan import plan
from drawloom.components.ports.run import Event, Interval, Step
from drawloom.components.storage.byte_size import format_decimal_byte_size
from drawloom.graph import UserError
from support.plans import RECIPE, on_a_gpu, plan_check


def test_a_run_that_does_not_fit_is_refused_before_it_allocates(tmp_path: Path) -> None:
    """The error suggests settings that would fit; a run may ask to try anyway."""
    with on_a_gpu(2_000_000), pytest.raises(UserError, match=r"each has 2.0 MB; settings that fit: .* = "):
        plan_check(tmp_path, "cuda").open()
    with on_a_gpu(2_000_000):
        plan_check(tmp_path, "cuda", refuse=False).open()
    with on_a_gpu(2**40):
        plan_check(tmp_path, "cuda").open()


def test_a_pipeline_is_refused_if_any_of_its_ranks_has_too_little(tmp_path: Path) -> None:
    """The first rank, which has enough memory, refuses too, and names the action on the rank without enough."""
    values = {"mesh": {"pipeline": 2}, "model": {"num_hidden_layers": 2, "vocab_size": 40_000}}
    recipe = RECIPE.with_values(values)
    planned = plan(recipe, find_device_model("cpu"))
    first, last = planned.memory
    assert last.peak_bytes > 1.1 * first.peak_bytes
    memory = int(0.94 * last.peak_bytes)  # beyond what a plan may be wrong by
    when = re.escape(last.action_at_peak)
    with (
        on_a_gpu(memory),
        pytest.raises(
            UserError, match=f"the run needs {format_decimal_byte_size(last.peak_bytes)} on a GPU, in {when}"
        ),
    ):
        plan_check(tmp_path, "cuda", recipe, 2).open()


def test_the_end_reports_planned_and_measured_figures(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The report comes before the final tasks; the first steps and excluded seconds do not count."""
    caplog.set_level("INFO")
    node = plan_check(tmp_path, "cpu")
    node.open()
    for index in range(1, 6):
        interval = Interval(0.0, 100.0 if index < 3 else 10.0, [(2.0, 8.0)])
        node.on_event(Event("step_ended", Step(index, 5, interval=interval)))
    said = (tmp_path / PLAN).read_text()
    assert "step" in said
    assert "4 s measured" in said
    node.on_event(Event("run_ended"))
    assert said.strip() in caplog.text


def test_a_comparison_reports_the_error_of_the_plan() -> None:
    """Memory is compared only if it was measured."""
    planned = plan(RECIPE, find_device_model("cpu"))
    half = planned.peak_memory_bytes[0] // 2
    assert "(+100.0%); step" in compare_with_plan(planned, half, 1.0)
    assert "planned; step" in compare_with_plan(planned, None, 1.0)
