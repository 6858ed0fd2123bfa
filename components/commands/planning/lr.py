"""draw a recipe's learning rate over the steps, and its batch if it has a ramp, without a device"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from drawloom.components.commands._plots import Panel, draw_svg_panels, draw_text_plot
from drawloom.components.planning.run_length import count_run_length
from drawloom.graph.cli.command import (
    JSON,
    Project,
    Recipe,
    RecipeCommand,
    Result,
    UserError,
    command,
    output,
    output_class,
)
from drawloom.ports import Batching, Phase, Step

MAX_POINTS = 2000


@output_class
class LrResult(Result):
    """Learning rates and batch sizes over the steps, computed without training."""

    formats: ClassVar[tuple[str, ...]] = ("text", "svg", JSON)

    recipe: str = output("recipe as given")
    curves: Mapping[str, Sequence[tuple[int, float]]] = output("pairs of a step and a value, by curve")

    def render(self, format: str) -> str:
        """Return pictures for a terminal, or an SVG document."""
        if format == "svg":
            panels = [Panel(name, "step", {"": points}, is_logarithmic=False) for name, points in self.curves.items()]
            return draw_svg_panels(self.recipe, panels)
        width = min(shutil.get_terminal_size((120, 0)).columns, 120)
        return "\n\n".join(draw_text_plot(name, {"": points}, width) for name, points in self.curves.items())


@command
class LrCommand(RecipeCommand):
    """Curves for the learning rate and the batch size, without training."""

    def run(self, project: Project) -> LrResult:
        return LrResult(self.recipe, dict(_compute_curves(self.load_recipe(project, self.recipe))))


def _compute_curves(recipe: Recipe) -> Iterator[tuple[str, list[tuple[int, float]]]]:
    """Yield one learning-rate curve per optimizer by name, and the batch size in rows if it changes."""
    graph, root = recipe.graph, recipe.project.root
    if root not in graph.nodes or not {"steps", "phases"} <= {*graph.nodes[root].settings, *graph.nodes[root].edges}:
        graph.require_valid()
        raise UserError(f"[{root}] has no steps and phases to draw", 2)
    if (length := count_run_length(recipe)) is None:
        graph.require_valid()
        raise UserError(f"[{root}] has neither steps nor epochs to draw", 2)
    total, phases = length.steps, graph.nodes[root].edges["phases"].targets
    steps = _select_plotted_steps(total)
    factors = [name for name in phases if "lr_factor" in graph.nodes[name].spec.traits.flow.writes]
    sizes = graph.implementers(Batching)
    writers = [name for name in phases if "lr" in graph.nodes[name].spec.traits.flow.writes]
    optimizers = [name for name in writers if "lr" in graph.nodes[name].settings]
    if not optimizers:
        graph.restrict_to(writers).require_valid()  # an invalid rate is missing from the settings
        raise UserError("no phase of the recipe has a setting lr to draw", 2)
    # The nodes are built but not opened, because opening requires the devices and data of the run.
    built = recipe.open([*factors, *sizes, *optimizers])
    built.build()
    values = _compute_learning_rate_factors([built[name] for name in factors], steps, total)
    for name in optimizers:
        rate = graph.nodes[name].settings["lr"]
        yield f"lr of [{name}]", [(step, rate * factor) for step, factor in zip(steps, values, strict=True)]
    for name in sizes:
        rows = [
            (step, float(built[name].first_row_position(step + 1) - built[name].first_row_position(step)))
            for step in steps
        ]
        if len({size for _, size in rows}) > 1:
            yield f"rows in a step of [{name}]", rows


def _compute_learning_rate_factors(phases: Sequence[Phase], steps: Sequence[int], total: int) -> list[float]:
    """Return the learning-rate factor at every step. Raises UserError if it depends on a run's values."""
    factors = []
    for index in steps:
        step = Step(index, total)
        try:
            for phase in phases:
                phase.run_phase(step)
        except KeyError as error:
            raise UserError(
                f"the learning rate depends on the step value {error}, and only a run computes it", 2
            ) from error
        factors.append(float(step.state.get("lr_factor", 1.0)))
    return factors


def _select_plotted_steps(total: int) -> list[int]:
    """Return all steps, or at most MAX_POINTS, including the first and the last."""
    if total <= MAX_POINTS:
        return list(range(1, total + 1))
    return sorted({1 + (total - 1) * number // (MAX_POINTS - 1) for number in range(MAX_POINTS)})
