"""
scale a recipe's width by muP, check that activations keep their size, and compare learning rates over widths

The coordinate check trains every width for some steps: in muP the root mean square of each layer's outputs does not
grow with the width, in the standard parametrization it does.
"""

import argparse
import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drawloom.components.commands._mup import Values, format_overlay, scale_width
from drawloom.components.commands._options import (
    integer_parser,
    parse_positive_integers,
    parse_positive_number,
    report_write_errors,
)
from drawloom.components.report.metrics import Column, read_metrics
from drawloom.components.storage.durable_files import replace_file
from drawloom.graph import UserError
from drawloom.graph.cli.exit_codes import FAILED, OK
from drawloom.graph.cli.result import Result, output, output_class
from drawloom.graph.project import Project, Recipe

MEASURE = "coordinates_of_ladder"
RMS = "activation_rms/"
FLAT = 0.15
"""Largest slope of a flat coordinate check: growth by 11% when the width doubles."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line arguments."""
    parser.add_argument("recipe", metavar="RECIPE", help="the narrowest model, of model.granite, with optim.adamw")
    parser.add_argument("--overlay", action="append", default=[], metavar="FILE", help="a recipe to merge over it")
    help = "widths as multiples of the recipe's (default 1,2,4,8)"
    parser.add_argument("--multiples", type=parse_positive_integers, default=[1, 2, 4, 8], metavar="N,N", help=help)
    parser.add_argument("--parametrization", choices=("mup", "standard"), default="mup", help="default: mup")
    parser.add_argument(
        "--steps", type=integer_parser(), default=8, metavar="N", help="steps of every width (default 8)"
    )
    parser.add_argument("--lr", type=_parse_rates, default=[], metavar="X,X", help="also compare these learning rates")
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="write an overlay per width, such as x4.toml")
    parser.epilog = "Set single values with node.key=value."


def _parse_rates(text: str) -> list[float]:
    """Parse learning rates separated by commas."""
    return [parse_positive_number(part) for part in text.split(",")]


@output_class
class LadderRung:
    """Overlay for a multiple of the recipe's width, and the RMS of its layers' outputs."""

    multiple: int = output("width as a multiple of the recipe's")
    rms: Mapping[str, float] = output("root mean square of a layer's outputs in the last step, by layer")
    losses: Mapping[str, float] = output("mean loss of the last quarter of the steps, by learning rate; with --lr only")
    overlay: str = output("settings of the width in TOML")


@output_class
class LadderResult(Result):
    """A coordinate check over widths, and learning rates with --lr."""

    parametrization: str = output("mup or standard")
    steps: int = output("steps of every width")
    rungs: Sequence[LadderRung] = output("widths, the narrowest first")
    slopes: Mapping[str, float] = output("slope of log rms over log width, by layer; 0 is flat")
    flat: bool = output("whether no slope is larger than 0.15 either way")

    @property
    def exit_code(self) -> int:
        """1 if muP's coordinate check is not flat."""
        return OK if self.flat or self.parametrization == "standard" else FAILED

    def render(self, format: str) -> str:
        """Return a table of the layers' outputs by width, and of losses by learning rate."""
        widths = [f"x{rung.multiple}" for rung in self.rungs]
        rows = [["layer", *widths, "slope"]]
        rows += [
            [layer, *(f"{rung.rms[layer]:.4g}" for rung in self.rungs), f"{slope:+.3f}"]
            for layer, slope in self.slopes.items()
        ]
        verdict = "flat" if self.flat else "not flat"
        parts = [f"rms of outputs after {self.steps} steps ({self.parametrization}): {verdict}", _format_table(rows)]
        if self.rungs[0].losses:
            rates = list(self.rungs[0].losses)
            rows = [["lr", *widths]]
            rows += [[rate, *(_format_and_mark_loss(rung.losses, rate) for rung in self.rungs)] for rate in rates]
            parts += ["", "loss by learning rate, * is the lowest of its width", _format_table(rows)]
        return "\n".join(parts)


def _format_and_mark_loss(losses: Mapping[str, float], rate: str) -> str:
    """Return a learning rate's loss as text, with * if it is the smallest."""
    return f"{losses[rate]:.4f}{'*' if losses[rate] == min(losses.values()) else ' '}"


def _format_table(rows: Sequence[Sequence[str]]) -> str:
    """Align cells to the right, in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def main(options: argparse.Namespace, project: Project) -> LadderResult:
    """Train all widths, and fit the slopes."""
    recipe = Recipe.load(options.recipe, *options.words, overlays=options.overlay, project=project)
    recipe.check()
    multiples = sorted(set(options.multiples))
    if len(multiples) < 2:
        raise UserError("--multiples: one width has no slope; write two or more, such as 1,2,4", 2)
    ladder = {multiple: scale_width(recipe.graph, multiple, options.parametrization) for multiple in multiples}
    rungs = []
    for multiple, values in ladder.items():
        wide = recipe.with_values(values)
        columns = _train_and_read_metrics(wide, options.steps)
        losses = {f"{rate:g}": _measure_final_loss(wide, options.steps, rate) for rate in options.lr}
        text = format_overlay(values, f"{multiple} times the width of {options.recipe}, {options.parametrization}.")
        measured = {name.removeprefix(RMS): column.values[-1] for name, column in columns.items() if RMS in name}
        rungs.append(LadderRung(multiple, measured, losses, text))
    if options.to is not None:
        _write_overlays(options.to, rungs)
    slopes = {layer: _fit_log_log_slope([(rung.multiple, rung.rms[layer]) for rung in rungs]) for layer in rungs[0].rms}
    flat = all(abs(slope) <= FLAT for slope in slopes.values())
    return LadderResult(options.parametrization, options.steps, rungs, slopes, flat)


def _train_and_read_metrics(recipe: Recipe, steps: int, values: Values | None = None) -> dict[str, Column]:
    """Train for some steps in this process, and return the metrics."""
    root = recipe.project.root
    with tempfile.TemporaryDirectory(prefix="ladder-") as folder:
        own: dict[str, Any] = {
            root: {"steps": steps, "on_finish": [], "listeners": []},
            "run": {"folder": str(Path(folder) / "run")},
            "metrics": {MEASURE: {"use": "metrics.activation_rms"}},
        }
        with recipe.with_values({**own, **(values or {})}, "ladder").open() as run:
            for _ in run.steps():
                pass
        return read_metrics(Path(folder) / "run").columns


def _measure_final_loss(recipe: Recipe, steps: int, rate: float) -> float:
    """Train with a learning rate, and return the mean loss over the last quarter of the steps."""
    [name] = [name for name, node in recipe.graph.nodes.items() if {"lr", "groups", "betas"} <= node.settings.keys()]
    losses = _train_and_read_metrics(recipe, steps, {name: {"lr": rate}})["loss"].values
    return statistics.fmean(losses[-max(1, steps // 4) :])


def _fit_log_log_slope(points: Sequence[tuple[int, float]]) -> float:
    """Return the slope of a least-squares line through the logarithms."""
    return statistics.linear_regression([math.log(x) for x, _ in points], [math.log(y) for _, y in points]).slope


def _write_overlays(folder: Path, rungs: Sequence[LadderRung]) -> None:
    """Write the overlay for every width, x<multiple>.toml."""
    folder.mkdir(parents=True, exist_ok=True)
    for rung in rungs:
        with report_write_errors(folder / f"x{rung.multiple}.toml"):
            replace_file(folder / f"x{rung.multiple}.toml", rung.overlay.encode())
