"""The command line: commands that any graph has, and those that a package adds under `components/commands`."""

import argparse
import importlib
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

from drawloom.graph.explain import explain
from drawloom.graph.listing import list_components
from drawloom.graph.problems import Problem, RecipeError, UserError
from drawloom.graph.resolving import resolve
from drawloom.graph.tree import draw_tree
from drawloom.graph.workshop import Workshop

FINE, FAILED, FAULTY, INTERRUPTED = 0, 1, 2, 130

OVERRIDE = re.compile(r"[\w-]+(\.[\w-]+)+=")
FLAG = re.compile(r"--[\w-]+(\.[\w-]+)+(=|$)")


def main(arguments: Sequence[str] | None = None, workshop: Workshop | None = None) -> int:
    """Run one command; its exit code."""
    workshop = workshop or Workshop.of("drawloom")
    rest, words = split_words(sys.argv[1:] if arguments is None else arguments)
    options = _parser(workshop, rest).parse_args(rest)
    options.words = words
    if words and not hasattr(options, "overlay"):
        return _say([Problem("DL110", f"{options.command} takes no values like {words[0]!r}")])
    try:
        return int(options.main(options, workshop))
    except RecipeError as error:
        return _say(error.problems)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output went away, which is its right
        return FINE


def split_words(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """What argparse is to read, and the overrides among it: a.b=c, --a.b=c, --a.b c."""
    rest: list[str] = []
    words: list[str] = []
    words_ahead = iter(arguments)
    for word in words_ahead:
        if FLAG.match(word):
            words.append(word)
            words += [] if "=" in word else islice(words_ahead, 1)
        elif OVERRIDE.match(word):
            words.append(word)
        else:
            rest.append(word)
    return rest, words


def _parser(workshop: Workshop, arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="drawloom", description="Weave training runs from components, by recipe.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (function, summary, add) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        add(command)
        command.set_defaults(main=function)
    for name in sorted(path.stem for path in (workshop.catalogue.folder / "commands").glob("[a-z]*.py")):
        _add_module(commands, workshop, name, imported=bool(arguments) and name.replace("_", "-") == arguments[0])
    return parser


def _add_module(commands: Any, workshop: Workshop, name: str, *, imported: bool) -> None:
    """A command of the package: its module is imported only when it is the one that was called."""
    path = workshop.catalogue.folder / "commands" / f"{name}.py"
    summary = path.read_text("utf-8").partition('"""')[2].partition('"""')[0].strip().partition("\n")[0]
    command = commands.add_parser(name.replace("_", "-"), help=summary, description=summary, allow_abbrev=False)
    if imported:
        module = importlib.import_module(f"{workshop.catalogue.package}.commands.{name}")
        module.add_arguments(command)
        command.set_defaults(main=module.main)


def _takes_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a path, or the name of a shipped recipe")
    parser.add_argument("--overlay", action="append", default=[], metavar="FILE", help="a recipe to lay over it")
    parser.epilog = "Single values are set by node.key=value."


def _takes_run(parser: argparse.ArgumentParser) -> None:
    _takes_recipe(parser)
    parser.add_argument("--accept-changes", action="store_true", help="resume although the recipe has changed")


def _takes_target(parser: argparse.ArgumentParser) -> None:
    _takes_recipe(parser)
    parser.add_argument("target", nargs="?", metavar="NODE[.KEY]", help="what to explain; the whole recipe if left out")


def _takes_subject(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("subject", nargs="?", default="", metavar="SUBJECT", help="such as data, or data.loader")


def _graph(options: argparse.Namespace, workshop: Workshop) -> Any:
    graph = workshop.graph(workshop.load(options.recipe, options.overlay, options.words))
    _say(problem for problem in graph.problems if problem.warning)
    return graph


def _run(options: argparse.Namespace, workshop: Workshop) -> int:
    graph = _graph(options, workshop)
    with workshop.container(graph, accept_changes=options.accept_changes) as objects:
        objects[workshop.root].run()
    return FINE


def _check(options: argparse.Namespace, workshop: Workshop) -> int:
    graph = _graph(options, workshop).or_error()
    print(f"{options.recipe}: {len(graph.nodes)} nodes, no problems")
    return FINE


def _show(options: argparse.Namespace, workshop: Workshop) -> int:
    print(resolve(_graph(options, workshop).or_error(), workshop.catalogue).text, end="")
    return FINE


def _draw(options: argparse.Namespace, workshop: Workshop) -> int:
    print(draw_tree(_graph(options, workshop).or_error(), workshop.root))
    return FINE


def _explain(options: argparse.Namespace, workshop: Workshop) -> int:
    print(explain(_graph(options, workshop).or_error(), options.target or "", workshop.root))
    return FINE


def _list(options: argparse.Namespace, workshop: Workshop) -> int:
    print(list_components(workshop.catalogue, options.subject))
    return FINE


def _say(problems: Iterable[Problem]) -> int:
    for problem in problems:
        print(problem, file=sys.stderr)
    return FAULTY


Command = tuple[Callable[[argparse.Namespace, Workshop], int], str, Callable[[argparse.ArgumentParser], None]]

COMMANDS: dict[str, Command] = {
    "run": (_run, "run a recipe, or go on with its run", _takes_run),
    "check": (_check, "check a recipe, and print every problem at once", _takes_recipe),
    "explain": (_explain, "say where values come from and why nodes are connected as they are", _takes_target),
    "show": (_show, "print the resolved recipe as TOML", _takes_recipe),
    "draw": (_draw, "draw what is built for a run, as a tree", _takes_recipe),
    "list": (_list, "list components with their settings", _takes_subject),
}
