"""plan a run without a GPU or data: memory per rank, time per step, tokens per second"""

from pathlib import Path

import attrs

from drawloom.components.commands._options import check_writable_file, write_file
from drawloom.components.commands._plan_result import CalibrationResult, PlanResult, SearchResult
from drawloom.components.distributed.device_model import DeviceModel, find_device_model
from drawloom.components.planning.calibrate import (
    choose_local_device,
    load_local_device_model,
    measure_and_save_calibration,
)
from drawloom.components.planning.checkpoint_interval import propose_checkpoint_interval
from drawloom.components.planning.nodes import Nodes
from drawloom.components.planning.plan import plan
from drawloom.components.planning.remedies import find_remedies
from drawloom.components.planning.run_length import count_run_length
from drawloom.components.planning.search import format_search_table, search_fastest_plans
from drawloom.graph import UserError
from drawloom.graph.cli.command import OverlayCommand, argument, command, option
from drawloom.graph.cli.terminal import print_escaped_text
from drawloom.graph.component import above, between
from drawloom.graph.project import Project, Recipe


@command("planning")
class PlanCommand(OverlayCommand):
    """A recipe's plan, after a calibration if asked for."""

    recipe: str = argument("a path, the name of a shipped recipe, or a run folder", default="")
    ranks: int | None = option("processes (default: the fewest the mesh allows)", check=between(1, 10_000_000))
    device: str = option(
        "h100, h200, a100, b200, mi300x, cpu, or a TOML file (default: this machine's device)",
        default="",
        metavar="DEVICE|FILE",
    )
    calibrate: bool = option("measure this machine's device in less than a minute, and use the result in later plans")
    search: bool = option("list the ten fastest meshes with microbatches, schedule and recomputation", needs="ranks")
    mtbf: float | None = option(
        "mean time between failures of one node, in hours; recommends how often to save",
        metavar="HOURS",
        check=above(0),
    )
    save_seconds: float | None = option(
        "seconds by which a save delays the run (default: estimated from its bytes)",
        metavar="SECONDS",
        check=above(0),
        needs="mtbf",
    )
    to: Path | None = option(
        "write the fastest as an overlay to this file", metavar="FILE", check=check_writable_file, needs="search"
    )

    def run(self, project: Project) -> PlanResult | SearchResult | CalibrationResult:
        calibration = _calibrate_device() if self.calibrate else None
        if not self.recipe:
            if calibration:
                return calibration
            raise UserError("plan takes a recipe, or --calibrate", 2)
        if calibration:
            print_escaped_text(calibration.render("text"))
        recipe = self.load_recipe(project, self.recipe)
        recipe.check(skip_machine_checks=True)
        device = find_device_model(self.device) if self.device else load_local_device_model()
        if self.search and self.ranks:
            return self._search_plans_and_write_best(recipe, device, self.ranks)
        planned = attrs.evolve(plan(recipe, device, self.ranks), length=count_run_length(recipe))
        helpful = [] if planned.fits else find_remedies(recipe, planned)
        interval = None
        if self.mtbf is not None:
            nodes = Nodes.from_recipe(recipe)
            interval = propose_checkpoint_interval(nodes, planned, self.mtbf * 3600, self.save_seconds)
        return PlanResult.from_plan(planned, helpful, interval)

    def _search_plans_and_write_best(self, recipe: Recipe, device: DeviceModel, ranks: int) -> SearchResult:
        """Find the best plans, and write the best plan's settings as an overlay."""
        length = count_run_length(recipe)
        choices = [
            attrs.evolve(choice, plan=attrs.evolve(choice.plan, length=length))
            for choice in search_fastest_plans(recipe, device, ranks)
        ]
        overlay = self.to if choices else None
        if overlay is not None:
            head = f"# For {ranks} ranks of {device.name}, by `drawloom plan {self.recipe} --search`."
            try:
                write_file(overlay, f"{head}\n{choices[0].overlay_toml}\n".encode())
            except UserError:
                print_escaped_text(format_search_table(choices))
                raise
        return SearchResult.from_choices(choices, overlay)


def _calibrate_device() -> CalibrationResult:
    """Measure this machine's device, and return the calibration."""
    path = measure_and_save_calibration(choose_local_device())
    return CalibrationResult(path, path.read_text("utf-8"))
