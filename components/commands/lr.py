"""draw a recipe's learning rate over the steps, and its batch if it has a ramp, without a device"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar
from xml.sax.saxutils import escape

import attrs

from drawloom.components.planning.run_length import count_run_length
from drawloom.components.ports.run import Batching, Phase, Step
from drawloom.graph import UserError
from drawloom.graph.cli.command import RecipeCommand, command
from drawloom.graph.cli.result import JSON, Result, output, output_class
from drawloom.graph.project import Project, Recipe
from drawloom.graph.wiring.node import Node

BLOCKS = " ▁▂▃▄▅▆▇█"
HEIGHT = 10  # lines of a picture in the terminal
WIDE, HIGH, LEFT, RIGHT, TOP, GAP = 720, 200, 84, 24, 48, 56
"""Sizes in pixels of a curve's area and of the margins around it."""
INK, PALE, LINE = "#1a1a1a", "#6b6b6b", "#3465a4"


@attrs.frozen
class ScheduleCurve:
    """Curve through values at ascending steps; the vertical axis begins at 0."""

    name: str
    points: Sequence[tuple[int, float]]

    @property
    def highest_value(self) -> float:
        """The largest value."""
        return max(value for _, value in self.points)

    @property
    def last_step(self) -> int:
        """The last step."""
        return self.points[-1][0]

    def find_value_up_to_step(self, step: float) -> float:
        """Return the value at the last point up to this step."""
        return next((value for known, value in reversed(self.points) if known <= step), self.points[0][1])


def format_short(value: float) -> str:
    """Format a number with few characters."""
    return f"{value:,.0f}" if value == int(value) and abs(value) >= 1 else f"{value:.3g}"


def draw_text_columns(curves: Sequence[ScheduleCurve], width: int) -> str:
    """Draw curves as block-character columns, `width` characters wide."""
    return "\n\n".join("\n".join(_draw_text_lines(curve, width)) for curve in curves)


def _draw_text_lines(curve: ScheduleCurve, width: int) -> Iterator[str]:
    """Yield a curve's name, and its picture from block characters with labels."""
    yield curve.name
    labels = [format_short(curve.highest_value), "0"]
    margin = max(map(len, labels))
    columns = max(10, width - margin - 2)
    steps = [1 + (curve.last_step - 1) * column / max(columns - 1, 1) for column in range(columns)]
    eighths = [round(curve.find_value_up_to_step(step) / (curve.highest_value or 1) * HEIGHT * 8) for step in steps]
    for line in range(HEIGHT - 1, -1, -1):
        label = labels[0] if line == HEIGHT - 1 else labels[1] if line == 0 else ""
        yield f"{label:>{margin}} │{''.join(BLOCKS[min(max(level - 8 * line, 0), 8)] for level in eighths)}".rstrip()
    last = f"step {curve.last_step:,}"
    yield f"{'':>{margin}} └{'─' * columns}"
    yield f"{'':>{margin}}  {'1':<{columns - len(last)}}{last}"


def draw_svg(title: str, curves: Sequence[ScheduleCurve]) -> str:
    """Return an SVG document with the curves below each other, over the same steps, on white."""
    height = TOP + len(curves) * (HIGH + GAP)
    width = LEFT + WIDE + RIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _format_svg_text(LEFT, 26, title, 16, INK),
    ]
    for number, curve in enumerate(curves):
        parts += _draw_svg_panel(curve, TOP + number * (HIGH + GAP))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _draw_svg_panel(curve: ScheduleCurve, top: float) -> Iterator[str]:
    """Yield the SVG elements for one curve, with axis labels and lines, below `top`."""
    bottom, span = top + 20 + HIGH, max(curve.last_step - 1, 1)

    def point(step: int, value: float) -> str:
        x = LEFT + WIDE * (step - 1) / span
        return f"{x:.1f},{bottom - HIGH * value / (curve.highest_value or 1):.1f}"

    yield _format_svg_text(LEFT, top + 10, curve.name, 13, INK)
    for share in (0.0, 0.5, 1.0):
        y = bottom - HIGH * share
        yield f'<line x1="{LEFT}" x2="{LEFT + WIDE}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ececec"/>'
        yield _format_svg_text(LEFT - 8, y + 4, format_short(curve.highest_value * share), 12, PALE, "end")
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        step = round(1 + span * share)
        yield _format_svg_text(LEFT + WIDE * share, bottom + 18, f"{step:,}", 12, PALE, "middle")
    points = " ".join(point(step, value) for step, value in curve.points)
    yield f'<polyline points="{points}" fill="none" stroke="{LINE}" stroke-width="2"/>'


def _format_svg_text(x: float, y: float, text: str, size: int, colour: str, anchor: str = "start") -> str:
    """Return an SVG text element."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" text-anchor="{anchor}">{escape(text)}</text>'
    )


MAX_POINTS = 2000


@output_class
class LrResult(Result):
    """Learning rates and batch sizes over the steps, computed without training."""

    formats: ClassVar[tuple[str, ...]] = ("text", "svg", JSON)

    recipe: str = output("recipe as given")
    curves: Mapping[str, Sequence[tuple[int, float]]] = output("pairs of a step and a value, by curve")

    def render(self, format: str) -> str:
        """Return block characters or an SVG document."""
        curves = [ScheduleCurve(name, points) for name, points in self.curves.items()]
        if format == "svg":
            return draw_svg(f"{self.recipe}, {curves[0].last_step:,} steps", curves).removesuffix("\n")
        return draw_text_columns(curves, min(shutil.get_terminal_size((120, 0)).columns, 120))


@command("planning")
class LrCommand(RecipeCommand):
    """Curves for the learning rate and the batch size, without training."""

    def run(self, project: Project) -> LrResult:
        curves = _compute_lr_and_batch_size_curves(self.load_recipe(project, self.recipe))
        return LrResult(self.recipe, {curve.name: curve.points for curve in curves})


def _compute_lr_and_batch_size_curves(recipe: Recipe) -> Iterator[ScheduleCurve]:
    """Yield one learning-rate curve per optimizer, and the batch size in rows if it changes."""
    graph, root = recipe.graph, recipe.project.root
    if root not in graph.nodes or not {"steps", "phases"} <= {*graph.nodes[root].settings, *graph.nodes[root].edges}:
        graph.require_valid()
        raise UserError(f"[{root}] has no steps and phases to draw", 2)
    if (length := count_run_length(recipe)) is None:
        graph.require_valid()
        raise UserError(f"[{root}] has neither steps nor epochs to draw", 2)
    total, phases = length.steps, graph.nodes[root].edges["phases"].targets
    steps = _select_plotted_steps(total)
    factors = [name for name in phases if "lr_factor" in _step_values_written_by(graph.nodes[name])]
    sizes = graph.implementers(Batching)
    writers = [name for name in phases if "lr" in _step_values_written_by(graph.nodes[name])]
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
        yield ScheduleCurve(
            f"lr of [{name}]", [(step, rate * factor) for step, factor in zip(steps, values, strict=True)]
        )
    for name in sizes:
        rows = [
            (step, float(built[name].first_row_position(step + 1) - built[name].first_row_position(step)))
            for step in steps
        ]
        if len({size for _, size in rows}) > 1:
            yield ScheduleCurve(f"rows in a step of [{name}]", rows)


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


def _step_values_written_by(phase: Node) -> Sequence[str]:
    """Return the step values written by a phase, as it declares."""
    return phase.spec.traits.flow.writes
