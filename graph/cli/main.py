"""The command line: commands that any graph has, and those that a package adds under `components/commands`."""

import argparse
import importlib
import re
import sys
from collections.abc import Sequence
from itertools import islice
from typing import Any

from drawloom.graph.cli.commands import COMMANDS
from drawloom.graph.cli.exit_codes import FINE, INTERRUPTED, print_problems
from drawloom.graph.cli.project import Project
from drawloom.graph.problems import Problem, RecipeError, UserError

OVERRIDE = re.compile(r"[\w-]+(\.[\w-]+)+=")
FLAG = re.compile(r"--[\w-]+(\.[\w-]+)+(=|$)")


def main(arguments: Sequence[str] | None = None, workshop: Project | None = None) -> int:
    """Run one command; its exit code."""
    workshop = workshop or Project.of("drawloom")
    rest, words = split_words(sys.argv[1:] if arguments is None else arguments)
    options = _parser(workshop, rest).parse_args(rest)
    options.words = words
    if words and not hasattr(options, "overlay"):
        return print_problems([Problem("DL110", f"{options.command} takes no values like {words[0]!r}")])
    try:
        return int(options.main(options, workshop.importing(getattr(options, "imports", ()))))
    except RecipeError as error:
        return print_problems(error.problems)
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


def _parser(workshop: Project, arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="drawloom", description="Weave training runs from components, by recipe.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (function, summary, add) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        add(command)
        command.set_defaults(main=function)
    for name in sorted(path.stem for path in (workshop.registry.folder / "commands").glob("[a-z]*.py")):
        _add_module(commands, workshop, name, imported=bool(arguments) and name.replace("_", "-") == arguments[0])
    return parser


def _add_module(commands: Any, workshop: Project, name: str, *, imported: bool) -> None:
    """A command of the package: its module is imported only when it is the one that was called."""
    path = workshop.registry.folder / "commands" / f"{name}.py"
    summary = path.read_text("utf-8").partition('"""')[2].partition('"""')[0].strip().partition("\n")[0]
    command = commands.add_parser(name.replace("_", "-"), help=summary, description=summary, allow_abbrev=False)
    if imported:
        module = importlib.import_module(f"{workshop.registry.package}.commands.{name}")
        module.add_arguments(command)
        command.set_defaults(main=module.main)
