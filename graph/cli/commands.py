"""The commands that any graph has."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from drawloom.graph.cli.exit_codes import INVALID, OK, STOPPED
from drawloom.graph.cli.terminal import print_text
from drawloom.graph.drawing.draw import FORMATS
from drawloom.graph.inspect.listing import list_components, list_fitting, list_plugins, list_ports
from drawloom.graph.problems import Problem, RecipeError, UserError, sort_problems
from drawloom.graph.project import Project, Recipe
from drawloom.graph.runtime.container import format_timings
from drawloom.graph.schema import recipe_schema


def _add_recipe(parser: argparse.ArgumentParser, name: str = "RECIPE", what: str = "") -> None:
    help = what or "a path, the name of a shipped recipe, or a run folder"
    parser.add_argument("recipe", metavar=name, help=help)
    parser.add_argument("--overlay", action="append", default=[], metavar="FILE", help="a recipe to merge over it")
    add_packages(parser)
    parser.epilog = "Single values are set by node.key=value."


def add_packages(parser: argparse.ArgumentParser) -> None:
    """Add `--import`, which every command takes."""
    help = "also offer the components of this package, folder or file, by their dotted path"
    parser.add_argument("--import", action="append", default=[], metavar="PATH", dest="imports", help=help)


def _add_check(parser: argparse.ArgumentParser) -> None:
    _add_recipe(parser)
    parser.add_argument("--format", choices=("text", "json"), default="text", help="text on stderr, or JSON on stdout")
    help = "do not check files and devices: the recipe runs on another machine"
    parser.add_argument("--elsewhere", action="store_true", help=help)


def _add_draw(parser: argparse.ArgumentParser) -> None:
    _add_recipe(parser)
    parser.add_argument("--format", choices=FORMATS, default="tree", help="text, or a picture for a program or a page")
    parser.add_argument(
        "--focus", default="", metavar="NODE", help="only what this node needs and the nodes that use it"
    )
    parser.add_argument("--step", action="store_true", help="what each member of a sequence reads, changes and writes")


def _add_run(parser: argparse.ArgumentParser) -> None:
    _add_recipe(parser)
    parser.add_argument("--timings", action="store_true", help="print how long each node took to build, open and close")
    parser.add_argument("--accept-changes", action="store_true", help="resume although the recipe has changed")
    parser.add_argument("--dry-run", action="store_true", help="print what would run, and do not run it")


def _add_old_and_new(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("old", metavar="A", help="a recipe, a shipped name, or a run folder")
    _add_recipe(parser, "B", "the recipe to compare with A")
    parser.epilog = "Overlays and values are merged over B."


def _add_target(parser: argparse.ArgumentParser) -> None:
    _add_recipe(parser)
    parser.add_argument("target", nargs="?", metavar="NODE[.KEY]", help="what to explain; the whole recipe if left out")


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the schema to this file")
    add_packages(parser)


def _add_subject(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("subject", nargs="?", default="", metavar="SUBJECT", help="such as data, or data.loader")
    help = "the components that can be this node of the shipped recipes, or that implement this port"
    parser.add_argument("--fits", metavar="NODE|PORT", help=help)
    parser.add_argument("--ports", action="store_true", help="all ports, each with the components that implement it")
    parser.add_argument(
        "--plugins", action="store_true", help="components of installed packages, with their distributions"
    )
    add_packages(parser)


def _load_recipe(options: argparse.Namespace, project: Project) -> Recipe:
    return Recipe.load(options.recipe, *options.words, overlays=options.overlay, project=project)


def _load_checked_recipe(options: argparse.Namespace, project: Project, *, elsewhere: bool = True) -> Recipe:
    """
    A recipe whose warnings are printed. Raises RecipeError with its errors, after the warnings.

    Without `elsewhere` also with what this machine lacks; a run finds that out itself.
    """
    recipe = _load_recipe(options, project)
    options.console.warn(problem for problem in recipe.graph.problems if problem.warning)
    recipe.check(elsewhere=elsewhere)
    return recipe


def _run(options: argparse.Namespace, project: Project) -> int:
    recipe = _load_checked_recipe(options, project)
    if options.dry_run:
        text = recipe.preview()
        if options.console.warns:  # one process of several
            print_text(text)
        return OK
    run = recipe.open(accept_changes=options.accept_changes)
    try:
        with run:
            signal = run[project.root].run()  # that stopped it, if one did
    finally:
        if options.timings:
            print_text(format_timings(run.timings), "stderr")
    return STOPPED + signal if signal else OK


def _check(options: argparse.Namespace, project: Project) -> int:
    if options.format == "json":
        return _check_json(options, project)
    recipe = _load_checked_recipe(options, project, elsewhere=options.elsewhere)
    count = len(recipe.graph.problems)
    found = f"{count} warning{'s' * (count > 1)}" if count else "no problems"
    print_text(f"{options.recipe}: {len(recipe.graph.nodes)} nodes, {found}")
    return OK


def _check_json(options: argparse.Namespace, project: Project) -> int:
    problems: list[Problem] = []
    nodes = 0
    try:
        recipe = _load_recipe(options, project)
        nodes = len(recipe.graph.nodes)
        problems = [problem for problem in recipe.graph.problems if problem.warning]
        recipe.check(elsewhere=options.elsewhere)
    except RecipeError as error:
        problems = sort_problems([*problems, *error.problems])
    found = {"recipe": options.recipe, "nodes": nodes, "problems": [problem.as_data() for problem in problems]}
    print_text(json.dumps(found, indent=1))
    return OK if all(problem.warning for problem in problems) else INVALID


def _show(options: argparse.Namespace, project: Project) -> int:
    print_text(_load_checked_recipe(options, project).resolved(), end="")
    return OK


def _draw(options: argparse.Namespace, project: Project) -> int:
    print_text(_load_checked_recipe(options, project).draw(options.format, options.focus, step=options.step), end="")
    return OK


def _explain(options: argparse.Namespace, project: Project) -> int:
    print_text(_load_checked_recipe(options, project).explain(options.target or ""))
    return OK


def _diff(options: argparse.Namespace, project: Project) -> int:
    found = _load_recipe(options, project).changes_since(Recipe.load(options.old, project=project))
    print_text("\n".join(map(str, found)) or "no differences")
    return OK


def _schema(options: argparse.Namespace, project: Project) -> int:
    schema = recipe_schema(project.registry, project.usual())
    text = json.dumps(schema, indent=1, ensure_ascii=False) + "\n"
    if options.output is None:
        print_text(text, end="")
    else:
        try:
            options.output.write_text(text, "utf-8")
        except OSError as error:
            raise UserError(f"--output {options.output}: {error.strerror}; write a path that can be written") from error
    return OK


def _list(options: argparse.Namespace, project: Project) -> int:
    if options.plugins:
        print_text(list_plugins(project.registry))
    elif options.ports:
        print_text(list_ports(project.registry))
    elif options.fits:
        print_text(list_fitting(project.registry, list(project.shipped()), options.fits))
    else:
        print_text(list_components(project.registry, options.subject))
    return OK


def _lsp(options: argparse.Namespace, project: Project) -> int:
    try:
        from drawloom.graph.lsp.server import serve  # pygls is an extra, and no other command needs it
    except ModuleNotFoundError as error:
        package = (error.name or "pygls").partition(".")[0]
        raise UserError(f"the package {package!r} is missing; pip install 'drawloom[lsp]'") from error
    serve(project)
    return OK


Command = tuple[Callable[[argparse.Namespace, Project], int], str, Callable[[argparse.ArgumentParser], None]]

COMMANDS: dict[str, Command] = {
    "run": (_run, "run a recipe, or resume its run", _add_run),
    "check": (_check, "check a recipe, and print every problem at once", _add_check),
    "explain": (_explain, "show where values come from and why nodes are connected", _add_target),
    "show": (_show, "print the resolved recipe as TOML", _add_recipe),
    "draw": (_draw, "draw what is built for a run, or one step of it", _add_draw),
    "diff": (_diff, "show what differs between two recipes or runs, and its impact on a resume", _add_old_and_new),
    "schema": (_schema, "print the JSON Schema of recipes, for editors", _add_output),
    "lsp": (_lsp, "serve an editor by the Language Server Protocol, on stdin and stdout", add_packages),
    "list": (_list, "list components with their settings", _add_subject),
}
