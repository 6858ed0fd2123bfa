"""draw a recipe's learning rate over the steps, and its batch if it has a ramp, without a device"""

import argparse
import json
import shutil
from collections.abc import Iterator, Sequence

from drawloom.components.commands._curves import Curve, draw_svg, draw_text
from drawloom.components.ports.run import Batching, Phase, Step
from drawloom.graph import UserError
from drawloom.graph.build.node import Node
from drawloom.graph.cli.terminal import print_text
from drawloom.graph.project import Project, Recipe

MOST_POINTS = 2000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe, or a run folder")
    parser.add_argument("--overlay", action="append", default=[], metavar="FILE", help="a recipe to merge over it")
    parser.add_argument("--format", choices=("text", "svg", "json"), default="text", help="text if left out")
    parser.epilog = "Single values are set by node.key=value."


def main(options: argparse.Namespace, project: Project) -> int:
    """Print the curves."""
    recipe = Recipe.load(options.recipe, *options.words, overlays=options.overlay, project=project)
    curves = list(_curves(recipe))
    if options.format == "json":
        print_text(json.dumps({curve.name: curve.points for curve in curves}))
    elif options.format == "svg":
        print_text(draw_svg(f"{options.recipe}, {curves[0].last:,} steps", curves), end="")
    else:
        print_text(draw_text(curves, min(shutil.get_terminal_size((120, 0)).columns, 120)))
    return 0


def _curves(recipe: Recipe) -> Iterator[Curve]:
    """The learning rate of each optimizer, and the rows of a step if they change."""
    graph, root = recipe.graph, recipe.project.root
    if root not in graph.nodes or not {"steps", "phases"} <= {*graph.nodes[root].settings, *graph.nodes[root].edges}:
        graph.or_error()
        raise UserError(f"[{root}] has no steps and phases to draw", 2)
    total, phases = graph.nodes[root].settings["steps"], graph.nodes[root].edges["phases"].targets
    steps = _drawn(total)
    factors = [name for name in phases if "lr_factor" in _writes(graph.nodes[name])]
    sizes = graph.implementers(Batching)
    optimizers = [name for name in phases if "lr" in _writes(graph.nodes[name]) and "lr" in graph.nodes[name].settings]
    if not optimizers:
        raise UserError("no phase of the recipe has a setting lr to draw", 2)
    # Built, but not opened: what opens needs the devices and data of the run.
    built = recipe.open([*factors, *sizes, *optimizers])
    built.build()
    found = _factors([built[name] for name in factors], steps, total)
    for name in optimizers:
        rate = graph.nodes[name].settings["lr"]
        yield Curve(f"lr of [{name}]", [(step, rate * factor) for step, factor in zip(steps, found, strict=True)])
    for name in sizes:
        rows = [(step, float(built[name].start(step + 1) - built[name].start(step))) for step in steps]
        if len({size for _, size in rows}) > 1:
            yield Curve(f"rows in a step of [{name}]", rows)


def _factors(phases: Sequence[Phase], steps: Sequence[int], total: int) -> list[float]:
    """The factor of each step. Raises UserError if it follows from what a run computes."""
    found = []
    for index in steps:
        step = Step(index, total)
        try:
            for phase in phases:
                phase.run_phase(step)
        except KeyError as error:
            raise UserError(f"the learning rate follows from {error}, which only a run has", 2) from error
        found.append(float(step.outputs.get("lr_factor", 1.0)))
    return found


def _drawn(total: int) -> list[int]:
    """All steps, or as many of them as a picture can show; the first and the last are always among them."""
    if total <= MOST_POINTS:
        return list(range(1, total + 1))
    return sorted({1 + (total - 1) * number // (MOST_POINTS - 1) for number in range(MOST_POINTS)})


def _writes(node: Node) -> Sequence[str]:
    return node.spec.traits.flow.writes
