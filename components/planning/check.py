"""Listener that compares a run with its plan, and refuses runs larger than the device's memory."""

import statistics
import tomllib
from collections.abc import Callable

import attrs
import torch

from drawloom import Recipe, RecipeError, ResolvedRecipe, UserError, component, internal, setting
from drawloom.components.planning.calibrate import load_local_device_model
from drawloom.components.planning.plan import Plan, plan
from drawloom.components.planning.search import describe_excess
from drawloom.components.planning.text import format_time_percentages
from drawloom.components.storage.byte_size import format_decimal_byte_size
from drawloom.components.storage.durable_files import replace_file
from drawloom.ports import Device, Event, Interval, Processes, RunFolder, run_log

PLAN = "plan.txt"

REFUSAL_FRACTION = 0.95
"""A run is refused if this fraction of its planned memory exceeds the device; the rest allows for a plan's error."""

WARM_UP_STEPS = 2
"""First steps of the process that are not measured: they compile and allocate."""


@component(impact="safe")
class PlanCheck:
    """
    Comparison between a run and its plan: memory and step time.

    On a GPU the run is planned before it allocates, and refused with remedies if it can't fit. At the end the
    comparison is logged, and written to `plan.txt` for the report. Measured memory is torch's peak allocation on rank 0
    of a GPU run; tensors on a CPU are not counted.
    """

    recipe: ResolvedRecipe
    device: Device
    processes: Processes
    folder: RunFolder
    refuse: bool = setting("refuse a run that can't fit its GPUs, before it allocates", default=True)

    _plan: Plan | None = internal(None)
    _interval: Interval | None = internal(None)  # of the last step
    _seconds: list[float] = internal(factory=list)
    _text: str = internal("")

    def open(self) -> None:
        """Raise a UserError if the run can't fit its GPUs."""
        if self.device.device.type != "cuda":
            return  # a CPU run has no limit; its plan takes seconds and can wait until the end
        self._plan = self._try_to_plan()
        # All ranks compute the same plan, so that all ranks end at once with the same error.
        if self.refuse and self._plan and REFUSAL_FRACTION * self._plan.peak_bytes > self._plan.device.memory:
            recipe = Recipe.of(tomllib.loads(self.recipe.text))
            hint = "to try the run anyway, write refuse = false in this component's node"
            raise UserError(f"{describe_excess(recipe, self._plan)}; {hint}")

    def on_event(self, event: Event) -> None:
        """Measure steps, and write the comparison before the final tasks write the report."""
        if event.kind == "step_ended" and event.step is not None:
            self._read_seconds()
            self._interval = event.step.interval
            if event.step.is_last and self.processes.rank == 0:
                self._read_seconds()
                self._write_comparison_file()
        elif event.kind == "run_ended" and self._text:
            run_log.info("%s", self._text)

    def _read_seconds(self) -> None:
        """Read the seconds of the last step that ended; a step later, so that the host does not wait for a GPU."""
        if self._interval is not None:
            self._seconds.append(self._interval.training_seconds)
            self._interval = None

    def _write_comparison_file(self) -> None:
        """Compare the plan with measured memory and median step time, and write the line to `plan.txt`."""
        self._plan = self._plan or self._try_to_plan()
        if self._plan is None:
            return
        measured = self.device.get_peak_memory_so_far() if self.device.device.type == "cuda" else None
        steps = self._seconds[WARM_UP_STEPS:] or self._seconds
        self._text = compare_with_plan(self._plan, measured, statistics.median(steps) if steps else 0.0)
        replace_file(self.folder.folder / PLAN, f"{self._text}\n".encode())

    def _try_to_plan(self) -> Plan | None:
        """Plan this run; log the reason and return None if it can't be planned."""
        try:
            return plan_run(Recipe.of(tomllib.loads(self.recipe.text)), self.device, self.processes)
        except (UserError, RecipeError, NotImplementedError) as error:
            run_log.info("plan    none: %s", error)
            return None


def plan_run(recipe: Recipe, device: Device, processes: Processes) -> Plan:
    """Plan this run's recipe for this machine, with its whole GPU memory."""
    model = load_local_device_model()
    if device.device.type == "cuda":
        model = attrs.evolve(model, memory=torch.cuda.get_device_properties(device.device).total_memory)
    return plan(recipe, model, processes.world_size)


def compare_with_plan(planned: Plan, measured_bytes: int | None, measured_seconds: float) -> str:
    """Return planned and measured values, the plan's relative error, and the planned time by part, as one line."""
    parts = [
        _format_planned_and_measured("memory", planned.peak_memory_bytes[0], measured_bytes, format_decimal_byte_size),
        _format_planned_and_measured("step", planned.time.seconds, measured_seconds, lambda value: f"{value:.3g} s"),
        f"planned time: {format_time_percentages(planned)}",
    ]
    return f"plan    {'; '.join(parts)}"


def _format_planned_and_measured(
    name: str, planned: float, measured: float | None, format_value: Callable[[float], str]
) -> str:
    """Return a quantity's planned and measured values as text, with the plan's relative error."""
    if not measured:
        return f"{name} {format_value(planned)} planned"
    return f"{name} {format_value(planned)} planned, {format_value(measured)} measured ({planned / measured - 1:+.1%})"
