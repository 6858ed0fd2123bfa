"""A listener that compares a run with its plan, and refuses what does not fit."""

import logging
import statistics
import time
import tomllib
from collections.abc import Callable

import attrs
import torch

from drawloom.components.planning.calibrate import at_hand
from drawloom.components.planning.plan import Plan, plan
from drawloom.components.planning.remedies import remedies, toml_lines
from drawloom.components.ports.distributed import Device, Processes
from drawloom.components.ports.run import Event, RunFolder
from drawloom.components.storage.byte_size import byte_size
from drawloom.components.storage.durable_files import replace_file
from drawloom.graph import RecipeError, ResolvedRecipe, UserError, component, setting
from drawloom.graph.project import Recipe

log = logging.getLogger("drawloom.run")

PLAN = "plan.txt"

SURELY = 0.95
"""A run is refused if it takes more than its device has by more than a plan may be wrong."""

WARM_UP = 2
"""Steps of the process that are not measured: the first ones compile and allocate."""


@component(impact="safe")
class PlanCheck:
    """
    Plans the run before it allocates, on a GPU, and compares plan and run at the end: memory and time of a step.

    What can't fit is refused, with what would help. The comparison is logged, and written to `plan.txt` for the report.
    Memory is that of rank 0 as torch has allocated it on a GPU; on a CPU nothing counts the bytes of tensors.
    """

    recipe: ResolvedRecipe
    device: Device
    processes: Processes
    folder: RunFolder
    refuse: bool = setting(default=True, doc="whether a run that can't fit its GPUs is refused before it allocates")

    clock: Callable[[], float] = attrs.field(init=False, default=time.monotonic)
    _plan: Plan | None = attrs.field(init=False, default=None)
    _started: float = attrs.field(init=False, default=0.0)
    _seconds: list[float] = attrs.field(init=False, factory=list)
    _text: str = attrs.field(init=False, default="")

    def open(self) -> None:
        """Raise a UserError if the run can't fit its GPUs."""
        if self.device.device.type != "cuda":
            return  # which has no limit of its own; to plan takes seconds, and can wait until the end
        self._plan = self._planned()
        # The same on every rank, whichever has too little: all end at once, and say why.
        if self.refuse and self._plan and SURELY * max(self._plan.peak_memory_bytes) > self._plan.device.memory:
            raise UserError(self._refusal(self._plan))

    def on_event(self, event: Event) -> None:
        """Measure steps; before the final tasks, which write the report, write the comparison."""
        if event.kind == "step_started":
            self._started = self.clock()
        elif event.kind == "step_ended" and event.step is not None:
            self._seconds.append(self.clock() - self._started - event.step.excluded_seconds)
            if event.step.last and self.processes.rank == 0:
                self._compare()
        elif event.kind == "run_ended" and self._text:
            log.info("%s", self._text)

    def _compare(self) -> None:
        self._plan = self._plan or self._planned()
        if self._plan is None:
            return
        measured = self.device.memory() if self.device.device.type == "cuda" else None
        steps = self._seconds[WARM_UP:] or self._seconds
        self._text = comparison(self._plan, measured, statistics.median(steps))
        replace_file(self.folder.folder / PLAN, f"{self._text}\n".encode())

    def _planned(self) -> Plan | None:
        """The plan of this run; None, and a message, for one that can't be planned."""
        try:
            device = at_hand()
            if self.device.device.type == "cuda":
                memory = torch.cuda.get_device_properties(self.device.device).total_memory
                device = attrs.evolve(device, memory=memory)
            return plan(Recipe.of(tomllib.loads(self.recipe.text)), device, self.processes.world_size)
        except (UserError, RecipeError, NotImplementedError) as error:
            log.info("plan    none: %s", error)
            return None

    def _refusal(self, planned: Plan) -> str:
        recipe = Recipe.of(tomllib.loads(self.recipe.text))
        fitting = [each for each in remedies(recipe, planned) if each.plan.fits and each.plan.ranks == planned.ranks]
        helps = " or ".join("; ".join(toml_lines(each.values)) for each in fitting) or "more ranks, or a smaller model"
        most = max(planned.memory, key=lambda rank: rank.peak)
        needed, there = map(byte_size, (most.peak, planned.device.memory))
        return (
            f"the run needs {needed} on a GPU, in {most.when}, and each has {there}; what "
            f"would fit: {helps}; with refuse = false where this plan is made, the run is tried"
        )


def comparison(planned: Plan, memory: int | None, seconds: float) -> str:
    """Planned and measured, and by how much the plan is wrong, as one line."""
    parts = [
        _pair("memory", planned.peak_memory_bytes[0], memory, byte_size),
        _pair("step", planned.time.seconds, seconds, lambda each: f"{each:.3g} s"),
    ]
    return f"plan    {'; '.join(parts)}"


def _pair(name: str, planned: float, measured: float | None, text: Callable[[float], str]) -> str:
    if not measured:
        return f"{name} {text(planned)} planned"
    return f"{name} {text(planned)} planned, {text(measured)} measured ({planned / measured - 1:+.1%})"
