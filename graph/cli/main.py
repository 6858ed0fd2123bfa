"""The command line: commands that any graph has, and those that a package adds under `components/commands`."""

import argparse
import importlib
import re
import sys
from collections.abc import Sequence
from itertools import islice
from typing import Any, NoReturn

from drawloom.graph.cli.commands import COMMANDS
from drawloom.graph.cli.exit_codes import FAILED, FAULTY, FINE, INTERRUPTED, Voice, told
from drawloom.graph.cli.project import Project
from drawloom.graph.problems import Problem, RecipeError, UserError

OVERRIDE = re.compile(r"[\w-]+(\.[\w-]+)+=")
FLAG = re.compile(r"--[\w-]+(\.[\w-]+)+(=|$)")


def main(arguments: Sequence[str] | None = None, workshop: Project | None = None, voice: Voice | None = None) -> int:
    """Run one command; its exit code."""
    voice = voice or Voice()
    try:
        return _command(sys.argv[1:] if arguments is None else arguments, workshop or Project.of("drawloom"), voice)
    except RecipeError as error:
        return voice.fail(told(error.problems), FAULTY)
    except UserError as error:
        return voice.fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        if voice.warns:
            print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output went away, which is its right
        return FINE
    except Exception as error:
        if voice.is_first(repr(error)):
            raise
        return FAILED


def _command(arguments: Sequence[str], workshop: Project, voice: Voice) -> int:
    rest, words = split_words(arguments)
    options = _parser(workshop, rest).parse_args(rest)
    options.words, options.voice = words, voice
    if words and not hasattr(options, "overlay"):
        raise RecipeError([Problem("DL110", f"{options.command} takes no values like {words[0]!r}")])
    return int(options.main(options, workshop.importing(getattr(options, "imports", ()))))


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


class _Parser(argparse.ArgumentParser):
    """One whose errors are told like those of everybody else."""

    def error(self, message: str) -> NoReturn:
        """Called by argparse, which expects that it does not return."""
        raise UserError(f"{self.format_usage()}{self.prog}: error: {message}", FAULTY)


def _parser(workshop: Project, arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = _Parser(prog="drawloom", description="Weave training runs from components, by recipe.")
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
