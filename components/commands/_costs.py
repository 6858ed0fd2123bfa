"""Stage costs from the options of `drawloom schedule`."""

from collections.abc import Container
from pathlib import Path
from typing import Any, Literal

from drawloom.components.commands._recipes import Pipeline, require_microbatches
from drawloom.components.distributed.device_model import find_device_model
from drawloom.components.pipeline.program.timing import Costs, CostTable
from drawloom.components.planning.calibrate import load_local_device_model
from drawloom.components.planning.cost_sources import CostSource, PlannedCosts, TracedCosts, UnitCosts
from drawloom.components.planning.traces import TracedStep, read_traced_step
from drawloom.graph import UserError
from drawloom.graph.project import Project, Recipe

MAX_COST = 1e9  # sums of costs must be finite, and small differences must not vanish beside them

OPS = {"F": "forward", "I": "backward_input", "W": "backward_weight", "B": "backward"}
FREE = {
    "comm": "comm",
    "unshard": "unshard",
    "reduce": "reduce",
    "offload": "offload",
}  # operations that may cost nothing

ParsedCosts = dict[str, Any] | Literal["plan"] | Path
"""Costs by setting, or the source of the costs: a plan, or a run folder with traces."""


def parse_costs(text: str) -> ParsedCosts:
    """Parse costs: `plan`, a run folder's path, or values such as F=1,I=1. Raises ValueError."""
    if text == "plan":
        return "plan"
    if "=" not in text and Path(text).is_dir():
        return Path(text)
    costs: dict[str, float] = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        try:
            costs[(OPS | FREE)[key.strip()]] = number = float(value)
        except (KeyError, ValueError):
            known = f"{', '.join(OPS | FREE)}, `plan`, or a run folder"
            raise ValueError(f"{part!r} is not a cost; write for example F=1 ({known})") from None
        if not (0 <= number <= MAX_COST and (number or key.strip() in FREE)):
            minimum = "F, B, I and W cost more than 0, all else 0 or more"
            raise ValueError(f"{part!r}: {minimum}, and none more than {MAX_COST:g}")
    return costs


def make_cost_source(costs: ParsedCosts, device: str, project: Project, recipe: Recipe | None) -> CostSource:
    """Return the source of costs. Raises UserError if it is `plan` and there is no recipe."""
    if isinstance(costs, dict):
        return UnitCosts(Costs(**costs))
    if isinstance(costs, Path):
        return TracedCosts(read_last_traced_step(costs, project))
    if recipe is None:
        raise UserError("--costs plan needs a recipe to plan; write a recipe, or costs such as F=1,I=1,W=1", 2)
    return PlannedCosts(recipe, find_device_model(device) if device else load_local_device_model())


def read_last_traced_step(folder: Path, project: Project) -> TracedStep:
    """Read the last traced step of a run folder, matched with the program of the run's recipe."""
    pipeline = Pipeline.from_recipe(Recipe.load(folder, project=project))
    return read_traced_step(
        folder, pipeline.schedule.program(pipeline.ranks, require_microbatches(pipeline.microbatches))
    )


def choose_cost_settings_of_schedule(setting_names: Container[str], source: CostSource, ranks: int) -> dict[str, Any]:
    """Return a schedule's cost settings: `slices` for `auto`, otherwise `comm`, a message's cost in forward passes."""
    if "slices" in setting_names:
        return source.auto_schedule_settings(ranks)
    if "comm" in setting_names:
        costs = source.stage_costs(ranks, 2)
        forward = costs.lengths[:, 0].mean() if isinstance(costs, CostTable) else costs.forward
        return {"comm": float(costs.comm / forward)}
    return {}
