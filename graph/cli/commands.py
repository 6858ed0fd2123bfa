"""The commands for any graph."""

import argparse
import gc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from drawloom.graph.cli.result import JSON, Result
from drawloom.graph.cli.results import (
    CheckResult,
    DiffResult,
    DrawResult,
    ExplainResult,
    ListResult,
    PortsResult,
    RunResult,
    SchemaResult,
    ShowResult,
    format_schema,
)
from drawloom.graph.cli.terminal import print_escaped_text
from drawloom.graph.garbage import free_closed_graphs
from drawloom.graph.inspect.listing import (
    find_component_names,
    find_fitting_components,
    format_components,
    format_fitting_components,
    format_plugins,
    list_ports,
)
from drawloom.graph.problems import Problem, RecipeError, ReopenError, UserError, sort_and_deduplicate_problems
from drawloom.graph.project import Project, Recipe
from drawloom.graph.runtime.container import format_timings
from drawloom.graph.schema import make_recipe_schema


def _add_recipe_arguments(parser: argparse.ArgumentParser, name: str = "RECIPE", description: str = "") -> None:
    help = description or "a path, the name of a shipped recipe, or a run folder"
    parser.add_argument("recipe", metavar=name, help=help)
    parser.add_argument(
        "--overlay", action="append", default=[], metavar="FILE", help="merge this recipe over RECIPE; may be repeated"
    )
    add_import_option(parser)
    parser.epilog = "Set single values with node.key=value."


def add_import_option(parser: argparse.ArgumentParser) -> None:
    """Add the option `--import`, which every command accepts."""
    help = "also use components from this package, folder or file; may be repeated"
    parser.add_argument("--import", action="append", default=[], metavar="PATH", dest="imports", help=help)


def _add_check_options(parser: argparse.ArgumentParser) -> None:
    _add_recipe_arguments(parser)
    help = "skip checks of files and devices, for a recipe that runs on another machine"
    parser.add_argument("--elsewhere", action="store_true", help=help)


def _add_draw_options(parser: argparse.ArgumentParser) -> None:
    _add_recipe_arguments(parser)
    parser.add_argument(
        "--focus",
        default="",
        metavar="NODE",
        help="draw only this node, its dependencies and its users",
    )
    parser.add_argument(
        "--step",
        action="store_true",
        help="draw the dataflow of one step: values read, changed and written by the phases",
    )


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    _add_recipe_arguments(parser)
    parser.add_argument(
        "--timings", action="store_true", help="print the seconds for building, opening and closing each node"
    )
    parser.add_argument("--accept-changes", action="store_true", help="resume the run even if its recipe has changed")
    parser.add_argument("--dry-run", action="store_true", help="describe the run without starting it")


def _add_diff_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("old", metavar="A", help="a path, the name of a shipped recipe, or a run folder")
    _add_recipe_arguments(parser, "B", "a recipe to compare with A: a path, a shipped name, or a run folder")
    parser.epilog = "Overlays and values apply to B."


def _add_explain_arguments(parser: argparse.ArgumentParser) -> None:
    _add_recipe_arguments(parser)
    parser.add_argument(
        "target", nargs="?", metavar="NODE[.KEY]", help="node, setting or edge to explain (default: the whole recipe)"
    )


def _add_schema_options(parser: argparse.ArgumentParser) -> None:
    help = "print the schema of this command's --format json, not of recipes"
    parser.add_argument("--result", metavar="COMMAND", help=help)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the schema to this file (default: stdout)")
    add_import_option(parser)


def _add_list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "subject",
        nargs="?",
        default="",
        metavar="SUBJECT",
        help="folder of components or one component, such as data or data.loader (default: all)",
    )
    help = "list the components that fit this node of the shipped recipes, or implement this port"
    parser.add_argument("--fits", metavar="NODE|PORT", help=help)
    parser.add_argument("--ports", action="store_true", help="list all ports with the components that implement them")
    parser.add_argument(
        "--plugins", action="store_true", help="list components of installed packages with their distributions"
    )
    add_import_option(parser)


def _load_recipe(options: argparse.Namespace, project: Project) -> Recipe:
    return Recipe.load(options.recipe, *options.words, overlays=options.overlay, project=project)


def _load_checked_recipe_and_warn(
    options: argparse.Namespace, project: Project, *, skip_machine_checks: bool = True
) -> Recipe:
    """
    Load a recipe and print its warnings. Raises RecipeError with its errors, after the warnings.

    Without `skip_machine_checks`, the errors include files and devices missing on this machine; a run detects these.
    """
    recipe = _load_recipe(options, project)
    options.console.print_warnings(problem for problem in recipe.graph.problems if problem.warning)
    recipe.check(skip_machine_checks=skip_machine_checks)
    return recipe


def _run_recipe(options: argparse.Namespace, project: Project) -> RunResult:
    """Run a recipe; open it again after a failure its nodes can survive."""
    recipe = _load_checked_recipe_and_warn(options, project)
    if options.dry_run:
        return RunResult(options.recipe, preview=recipe.preview())
    handed_over: Mapping[str, Any] = {}
    try:
        while True:
            gc.freeze()  # imports make a million objects, through which every full collection would walk
            try:
                return _open_and_run_once(recipe, options, project.root, handed_over)
            except ReopenError as request:
                handed_over = request.handed_over
            free_closed_graphs()
    finally:
        gc.unfreeze()


def _open_and_run_once(
    recipe: Recipe, options: argparse.Namespace, root: str, handed_over: Mapping[str, Any]
) -> RunResult:
    """Open the run with a failed attempt's values, run it to its end or a signal, and print its timings."""
    run = recipe.open(accept_changes=options.accept_changes)
    run.handed_over = handed_over
    try:
        with run:
            signal = run[root].run()  # the signal that stopped the run, or 0
            outcome = run.outcome()
    finally:
        if options.timings:
            print_escaped_text(format_timings(run.timings), "stderr")
    return RunResult(options.recipe, signal, outcome=outcome)


def _check_recipe(options: argparse.Namespace, project: Project) -> CheckResult:
    if options.format != JSON:
        recipe = _load_checked_recipe_and_warn(options, project, skip_machine_checks=options.elsewhere)
        return CheckResult.from_problems(options.recipe, len(recipe.graph.nodes), recipe.graph.problems)
    problems: list[Problem] = []
    nodes = 0
    try:
        recipe = _load_recipe(options, project)
        nodes = len(recipe.graph.nodes)
        problems = [problem for problem in recipe.graph.problems if problem.warning]
        recipe.check(skip_machine_checks=options.elsewhere)
    except RecipeError as error:
        problems = sort_and_deduplicate_problems([*problems, *error.problems])
    return CheckResult.from_problems(options.recipe, nodes, problems)


def _resolve_recipe(options: argparse.Namespace, project: Project) -> ShowResult:
    return ShowResult.from_recipe(_load_checked_recipe_and_warn(options, project))


def _draw_recipe(options: argparse.Namespace, project: Project) -> DrawResult:
    return DrawResult.from_recipe(_load_checked_recipe_and_warn(options, project), options.focus, options.step)


def _explain_recipe(options: argparse.Namespace, project: Project) -> ExplainResult:
    target = options.target or ""
    return ExplainResult(target, _load_checked_recipe_and_warn(options, project).explain(target))


def _compare_recipes(options: argparse.Namespace, project: Project) -> DiffResult:
    return DiffResult.from_changes(
        _load_recipe(options, project).changes_since(Recipe.load(options.old, project=project))
    )


def _make_and_write_schema(options: argparse.Namespace, project: Project) -> SchemaResult:
    schema = options.read_result_schema(options.result) if options.result else None
    schema = schema or make_recipe_schema(project.registry, project.shipped_components_by_node())
    if options.output is not None:
        try:
            options.output.write_text(f"{format_schema(schema)}\n", "utf-8")
        except OSError as error:
            raise UserError(f"--output {options.output}: {error.strerror}; name a file in a writable folder") from error
    return SchemaResult(schema, options.output)


def _list_components(options: argparse.Namespace, project: Project) -> ListResult | PortsResult:
    registry = project.registry
    if options.plugins:
        return ListResult.from_component_names(registry, registry.installed.names(), format_plugins(registry))
    if options.ports:
        return PortsResult.from_listings(list_ports(registry))
    if options.fits:
        fitting = find_fitting_components(registry, list(project.shipped_graphs()), options.fits)
        return ListResult.from_component_names(registry, fitting, format_fitting_components(fitting, options.fits))
    names = find_component_names(registry, options.subject)
    return ListResult.from_component_names(registry, names, format_components(registry, options.subject))


def _serve_language_server(options: argparse.Namespace, project: Project) -> None:
    try:
        from drawloom.graph.lsp.server import serve_language_server  # pygls is an extra, and no other command needs it
    except ModuleNotFoundError as error:
        package = (error.name or "pygls").partition(".")[0]
        raise UserError(f"the package {package!r} is missing; pip install 'drawloom[lsp]'") from error
    serve_language_server(project)


Main = Callable[[argparse.Namespace, Project], Result | None]
"""A command. Its return annotation names the classes of its results; None stands for a server."""

Command = tuple[Main, str, Callable[[argparse.ArgumentParser], None]]

COMMANDS: dict[str, Command] = {
    "run": (_run_recipe, "run a recipe, or resume its run", _add_run_options),
    "check": (_check_recipe, "check a recipe, and print every problem at once", _add_check_options),
    "explain": (_explain_recipe, "show where values come from and why nodes are connected", _add_explain_arguments),
    "show": (_resolve_recipe, "print the resolved recipe as TOML", _add_recipe_arguments),
    "draw": (_draw_recipe, "draw the nodes of a run, or the dataflow of one step", _add_draw_options),
    "diff": (
        _compare_recipes,
        "list the differences between two recipes or runs, and their impact on resuming",
        _add_diff_arguments,
    ),
    "schema": (_make_and_write_schema, "print the JSON Schema of recipes, or of a command's JSON", _add_schema_options),
    "lsp": (
        _serve_language_server,
        "start the language server (LSP) for an editor, on stdin and stdout",
        add_import_option,
    ),
    "list": (_list_components, "list components with their settings", _add_list_arguments),
}
