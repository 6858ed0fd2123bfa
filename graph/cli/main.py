"""The command line: the commands for any graph, and the commands in a package's folder `components/commands`."""

import argparse
import importlib
import os
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from itertools import islice, pairwise
from types import ModuleType
from typing import Any, NoReturn

from drawloom.graph.cli.commands import COMMANDS, Main, add_import_option
from drawloom.graph.cli.exit_codes import FAILED, INTERRUPTED, INVALID, OK, Console, describe_machine_limit
from drawloom.graph.cli.result import (
    JSON,
    CommandFailure,
    Schema,
    as_data,
    dump_json,
    find_result_classes,
    list_output_formats,
    make_result_schema,
)
from drawloom.graph.cli.terminal import print_escaped_text, redirect_stdout_to_stderr, redirect_to_null
from drawloom.graph.problems import Problem, RecipeError, ReportedError, UserError, did_you_mean, find_nearest
from drawloom.graph.project import Project

# The name of a node as a key, such as @metrics.learning or @metrics.*, is an anchor of a list edit.
OVERRIDE = re.compile(r"[\w-]+(\.(@?[\w-]+|\*))+=")
FLAG = re.compile(r"--[\w-]+(\.(@?[\w-]+|\*))+(=|$)")


def main(arguments: Sequence[str] | None = None, project: Project | None = None, console: Console | None = None) -> int:
    """Run one command and return its exit code."""
    console = console or Console()
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        return _run_command(arguments, project or Project.from_package("drawloom"), console)
    except ReportedError as error:
        return error.exit_code
    except (RecipeError, UserError) as error:
        return _print_failure(CommandFailure.from_error(error), arguments, console)
    except KeyboardInterrupt:
        if console.warns:
            print_escaped_text("interrupted", "stderr")
        return INTERRUPTED
    except BrokenPipeError:
        redirect_to_null("stdout")  # its reader, such as `head`, has closed it
        return OK
    except Exception as error:
        if reason := describe_machine_limit(error):
            return _print_failure(CommandFailure(FAILED, reason), arguments, console)
        if console.is_first(repr(error)):
            raise
        return FAILED


def _print_failure(failure: CommandFailure, arguments: Sequence[str], console: Console) -> int:
    """Print a failure, once for several processes, and return its exit code."""
    if console.is_first(failure.text):
        print_escaped_text(failure.text, "stderr")
        if "--format=json" in arguments or ("--format", JSON) in pairwise(arguments):
            print_escaped_text(failure.json())
    return failure.exit_code


def _run_command(arguments: Sequence[str], project: Project, console: Console) -> int:
    if not _does_current_folder_exist():
        raise UserError("the current folder has been removed; change to another one")
    rest, words = split_off_overrides(arguments)
    parser = _make_parser(project, rest)
    _refuse_unknown_command_and_spaced_equals(parser, rest)
    options = parser.parse_args(rest)
    options.words, options.console = words, console
    options.read_result_schema = partial(read_result_schema, project)
    if words and not hasattr(options, "overlay"):
        raise RecipeError(
            [Problem("DL110", f"the command {options.command} accepts no overrides such as {words[0]!r}")]
        )
    function: Main = options.main
    project = project.with_imports(getattr(options, "imports", ()))
    if not list_output_formats(function):
        function(options, project)
        return OK
    with redirect_stdout_to_stderr() if options.format == JSON else nullcontext():
        result = function(options, project)
    if result is None:
        raise TypeError(f"the command {options.command} returned no result; its main must return a Result")
    text = dump_json(as_data(result)) if options.format == JSON else result.render(options.format)
    if text and console.warns:  # one process of several
        print_escaped_text(text)
    return result.exit_code


def list_command_names(project: Project) -> list[str]:
    """Return all command names, ordered as in `drawloom --help`."""
    return [*COMMANDS, *(name.replace("_", "-") for name in _list_command_modules(project))]


def format_command_help(project: Project, command: str) -> str:
    """Return a command's help text."""
    subparsers = next(action for action in _make_parser(project, [command])._actions if action.dest == "command")
    return str(dict(subparsers.choices or {})[command].format_help())


def read_result_schema(project: Project, command: str) -> Schema:
    """
    Return the JSON Schema for a command with `--format json`.

    Raises UserError for an unknown command, or for a server, whose output is a protocol.
    """
    names = list_command_names(project)
    if command not in names:
        raise UserError(f"there is no command {command!r}; {did_you_mean(command, names)}".rstrip("; "), INVALID)
    function = COMMANDS[command][0] if command in COMMANDS else _import_command(project, command.replace("-", "_")).main
    if not (classes := find_result_classes(function)):
        raise UserError(
            f"{command} is a server and has no result that a schema could describe; name another command", INVALID
        )
    return make_result_schema(command, classes)


def _refuse_unknown_command_and_spaced_equals(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    """Refuse two typing errors for which argparse prints no useful hint."""
    commands = next(action.choices for action in parser._actions if action.dest == "command")
    if arguments and arguments[0][:1] != "-" and commands and arguments[0] not in commands:
        near = find_nearest(arguments[0], commands)
        hint = f"did you mean {near!r}?" if near else f"available: {', '.join(commands)}"
        parser.error(f"there is no command {arguments[0]!r}; {hint}")
    if "=" in arguments[1:-1]:
        index = arguments.index("=", 1)
        parser.error(f"write {arguments[index - 1]}={arguments[index + 1]}, without spaces")


def _does_current_folder_exist() -> bool:
    try:
        return bool(os.getcwd())
    except FileNotFoundError:
        return False


def split_off_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the arguments for argparse from overrides a.b=c, --a.b=c and --a.b c, and return overrides as a.b=c."""
    rest: list[str] = []
    words: list[str] = []
    remaining = iter(arguments)
    for word in remaining:
        if FLAG.match(word):
            value = "" if "=" in word else "".join(f"={value}" for value in islice(remaining, 1))
            words.append((word + value).removeprefix("--") if "=" in word or value else word)
        elif OVERRIDE.match(word):
            words.append(word)
        else:
            rest.append(word)
    return rest, words


class _Parser(argparse.ArgumentParser):
    """Argument parser whose errors are printed once for several processes."""

    def error(self, message: str) -> NoReturn:
        """Raise a UserError, since argparse requires a method without return."""
        if message.startswith("unrecognized arguments"):
            message += "; set values with node.key=value, such as trainer.steps=10"
        raise UserError(f"{self.format_usage()}{self.prog}: error: {message}", INVALID)


def _make_parser(project: Project, arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = _Parser(prog="drawloom", description="Train language models from recipes of components.")
    package = importlib.import_module(project.registry.package.partition(".")[0])
    version = f"%(prog)s {getattr(package, '__version__', '')}".rstrip()
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    names = list_command_names(project)
    called = arguments[0] if arguments and arguments[0] in names else ""
    for name in [called] if called else names:  # all parsers together would take longer than a short command
        if name in COMMANDS:
            function, summary, add = COMMANDS[name]
            command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
            add(command)
            _add_format_option(command, function)
        else:
            _add_command_module(commands, project, name.replace("-", "_"), is_called=name == called)
    return parser


def _add_command_module(commands: Any, project: Project, name: str, *, is_called: bool) -> None:
    """Add a command of the package. Its module is imported only if the command is called."""
    path = project.registry.folder / "commands" / f"{name}.py"
    summary = path.read_text("utf-8").partition('"""')[2].partition('"""')[0].strip().partition("\n")[0]
    command = commands.add_parser(name.replace("_", "-"), help=summary, description=summary, allow_abbrev=False)
    if is_called:
        module = _import_command(project, name)
        module.add_arguments(command)
        add_import_option(command)
        _add_format_option(command, module.main)


def _add_format_option(parser: argparse.ArgumentParser, function: Main) -> None:
    parser.set_defaults(main=function)
    if formats := list_output_formats(function):
        help = f"print the result in this format (default {formats[0]}); with json, all else is on stderr"
        parser.add_argument("--format", choices=formats, default=formats[0], help=help)


def _list_command_modules(project: Project) -> list[str]:
    return sorted(path.stem for path in (project.registry.folder / "commands").glob("[a-z]*.py"))


def _import_command(project: Project, name: str) -> ModuleType:
    return importlib.import_module(f"{project.registry.package}.commands.{name}")
