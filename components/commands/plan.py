"""plan a run without a GPU or data: memory per rank, time per step, tokens per second"""

import argparse
import re

from drawloom.components.commands._options import convert_write_errors, parse_positive_number, parse_writable_path
from drawloom.components.commands._plan_result import CalibrationResult, PlanResult, SearchResult
from drawloom.components.commands._recipes import add_overlay_option
from drawloom.components.distributed.device_model import DeviceModel, find_device_model
from drawloom.components.planning.calibrate import (
    choose_local_device,
    load_local_device_model,
    measure_and_save_calibration,
)
from drawloom.components.planning.checkpoint_interval import CheckpointInterval, propose_checkpoint_interval
from drawloom.components.planning.nodes import Nodes
from drawloom.components.planning.plan import Plan, plan
from drawloom.components.planning.remedies import find_remedies
from drawloom.components.planning.search import format_search_table, search_fastest_plans
from drawloom.components.storage.durable_files import replace_file
from drawloom.graph import UserError
from drawloom.graph.cli.terminal import print_escaped_text
from drawloom.graph.project import Project, Recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line arguments."""
    parser.add_argument(
        "recipe", nargs="?", metavar="RECIPE", help="a path, the name of a shipped recipe, or a run folder"
    )
    add_overlay_option(parser)
    parser.add_argument(
        "--ranks", type=_parse_positive_count, metavar="N", help="processes (default: the fewest the mesh allows)"
    )
    devices = "h100, h200, a100, b200, mi300x, cpu, or a TOML file (default: this machine's device)"
    parser.add_argument("--device", metavar="DEVICE|FILE", help=devices)
    help = "measure this machine's device in less than a minute, and use the result in later plans"
    parser.add_argument("--calibrate", action="store_true", help=help)
    help = "with --ranks: list the ten fastest meshes with microbatches, schedule and recomputation"
    parser.add_argument("--search", action="store_true", help=help)
    help = "mean time between failures of one node, in hours; recommends how often to save"
    parser.add_argument("--mtbf", type=parse_positive_number, metavar="HOURS", help=help)
    help = "with --mtbf: seconds by which a save delays the run (default: estimated from its bytes)"
    parser.add_argument("--save-seconds", type=parse_positive_number, metavar="SECONDS", help=help)
    help = "with --search: write the fastest as an overlay to this file"
    parser.add_argument("--to", type=parse_writable_path, metavar="FILE", help=help)


def main(options: argparse.Namespace, project: Project) -> PlanResult | SearchResult | CalibrationResult:
    """Plan the recipe, after a calibration if asked for."""
    calibration = _calibrate_device() if options.calibrate else None
    if not options.recipe:
        if calibration:
            return calibration
        raise UserError("plan takes a recipe, or --calibrate", 2)
    if calibration:
        print_escaped_text(calibration.render("text"))
    recipe = Recipe.load(options.recipe, *options.words, overlays=options.overlay, project=project)
    recipe.check(skip_machine_checks=True)
    device = find_device_model(options.device) if options.device else load_local_device_model()
    if options.search:
        return _search_plans_and_write_best(options, recipe, device)
    if options.to is not None:
        raise UserError("--to writes the best plan that --search finds; add --search", 2)
    planned = plan(recipe, device, options.ranks)
    helpful = [] if planned.fits else find_remedies(recipe, planned)
    return PlanResult.from_plan(planned, helpful, _propose_checkpoint_interval(options, recipe, planned))


def _calibrate_device() -> CalibrationResult:
    """Measure this machine's device, and return the calibration."""
    path = measure_and_save_calibration(choose_local_device())
    return CalibrationResult(path, path.read_text("utf-8"))


def _propose_checkpoint_interval(
    options: argparse.Namespace, recipe: Recipe, planned: Plan
) -> CheckpointInterval | None:
    """Return the checkpoint interval, or None without --mtbf."""
    if options.mtbf is None:
        if options.save_seconds is not None:
            raise UserError("--save-seconds needs the time between failures; write --mtbf HOURS", 2)
        return None
    return propose_checkpoint_interval(Nodes.from_recipe(recipe), planned, options.mtbf * 3600, options.save_seconds)


def _search_plans_and_write_best(options: argparse.Namespace, recipe: Recipe, device: DeviceModel) -> SearchResult:
    """Find the best plans, and write the best plan's settings as an overlay."""
    if options.ranks is None:
        raise UserError("--search needs a number of ranks; write --ranks 8", 2)
    choices = search_fastest_plans(recipe, device, options.ranks)
    overlay = options.to if choices else None
    if overlay is not None:
        head = f"# For {options.ranks} ranks of {device.name}, by `drawloom plan {options.recipe} --search`."
        try:
            with convert_write_errors(overlay):
                replace_file(overlay, f"{head}\n{choices[0].overlay_toml}\n".encode())
        except UserError:
            print_escaped_text(format_search_table(choices))
            raise
    return SearchResult.from_choices(choices, overlay)


def _parse_positive_count(text: str) -> int:
    """Parse a positive integer below ten million. Raises ArgumentTypeError."""
    if not re.fullmatch(r"[0-9]{1,7}", text) or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer of at most seven digits")
    return int(text)
