"""The command line: the commands for any graph, and the commands in a package's folder `components/commands`."""

import argparse
import importlib
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import groupby, islice, pairwise
from pathlib import Path

import attrs

from drawloom.graph.cli.arguments import Parser, parse_command
from drawloom.graph.cli.command import (
    FAILED,
    GROUPS,
    INTERRUPTED,
    INVALID,
    JSON,
    OK,
    Command,
    CommandFailure,
    Console,
    describe_machine_limit,
    list_output_formats,
)
from drawloom.graph.cli.terminal import print_escaped_text, redirect_stdout_to_stderr, redirect_to_null
from drawloom.graph.problems import RecipeError, ReportedError, UserError, did_you_mean
from drawloom.graph.project import Project

# The name of a node as a key, such as @metrics.learning or @metrics.*, is an anchor of a list edit.
# It may be in quotes, as in a file.
DOTTED = r"""[\w-]+(\.(@?[\w-]+|\*|"@[^"]+"|'@[^']+'))+"""
OVERRIDE = re.compile(f"{DOTTED}=")
FLAG = re.compile(f"--{DOTTED}(=|$)")


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
            from drawloom.graph.cli.json_text import dump_json

            print_escaped_text(dump_json({"error": failure}))
    return failure.exit_code


def _run_command(arguments: Sequence[str], project: Project, console: Console) -> int:
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise UserError("the current folder has been removed; change to another one") from error
    rest, words = split_off_overrides(arguments)
    name, files = rest[0] if rest else "", find_command_files(project)
    if name not in files:
        _print_or_refuse(project, files, rest)
        return OK
    if "=" in rest[1:-1]:
        index = rest.index("=", 1)
        _make_main_parser(project, files).error(f"write {rest[index - 1]}={rest[index + 1]}, without spaces")
    cls = files[name].load()
    command = parse_command(cls, name, rest[1:], words, files[name].summary, console=console)
    project = project.with_imports(command.imports)
    with redirect_stdout_to_stderr() if command.format == JSON else nullcontext():
        result = command.run(project)
    if not list_output_formats(cls.run):  # a server
        return OK
    if result is None:
        raise TypeError(f"the command {name} returned no result; its `run` must return a Result")
    if command.format == JSON:
        from drawloom.graph.cli.json_text import dump_json

        text = dump_json(result)
    else:
        text = result.render(command.format)
    if text and console.warns:  # one process of several
        print_escaped_text(text)
    return result.exit_code


@attrs.frozen
class CommandFile:
    """A command's file, imported only by `load`: its module, group (its folder), and docstring's first line."""

    module: str
    group: str
    summary: str

    def load(self) -> type[Command]:
        """Import the file, and return its command."""
        classes = [cls for cls in vars(importlib.import_module(self.module)).values() if isinstance(cls, type)]
        return next(cls for cls in classes if issubclass(cls, Command) and cls.__module__ == self.module)


def find_command_files(project: Project) -> dict[str, CommandFile]:
    """Return the commands for any graph and the package's commands by name, ordered as in `drawloom --help`."""
    folders = {
        f"{__package__}.commands": Path(__file__).parent / "commands",
        f"{project.registry.package}.commands": project.registry.folder / "commands",
    }
    files = {}
    for package, folder in folders.items():
        for path in folder.glob("*/[a-z]*.py"):
            summary = path.read_text("utf-8").partition('"""')[2].partition('"""')[0].strip().partition("\n")[0]
            group = path.parent.name
            files[path.stem.replace("_", "-")] = CommandFile(f"{package}.{group}.{path.stem}", group, summary)
    return dict(sorted(files.items(), key=lambda item: ((*GROUPS, item[1].group).index(item[1].group), item[0])))


def load_command(project: Project, name: str) -> type[Command]:
    """Return a command's class. Raises UserError for an unknown name."""
    files = find_command_files(project)
    if name not in files:
        raise UserError(f"there is no command {name!r}; {did_you_mean(name, files)}".rstrip("; "), INVALID)
    return files[name].load()


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


def _make_main_parser(project: Project, files: Mapping[str, CommandFile]) -> Parser:
    """Return the parser for a command line without a command; its help lists all by group."""
    width = max(shutil.get_terminal_size().columns - 2, 40)
    lines = []
    for group, members in groupby(files.items(), lambda item: item[1].group):
        lines.append(f"{group}:")
        for name, file in members:
            lines.append(textwrap.fill(f"  {name:<16}{file.summary}", width, subsequent_indent=" " * 18))
        lines.append("")
    parser = Parser(
        prog="drawloom",
        usage="drawloom [-h] [--version] COMMAND ...",
        description="Train language models from recipes of components.",
        epilog="\n".join([*lines, "`drawloom COMMAND --help` describes a command."]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    package = importlib.import_module(project.registry.package.partition(".")[0])
    version = f"%(prog)s {getattr(package, '__version__', '')}".rstrip()
    parser.add_argument("--version", action="version", version=version)
    parser.add_argument("command", metavar="COMMAND", help=argparse.SUPPRESS)
    return parser


def _print_or_refuse(project: Project, files: Mapping[str, CommandFile], arguments: list[str]) -> None:
    """Parse a command line without a command. Raises UserError if it has neither --help nor --version."""
    parser = _make_main_parser(project, files)
    if arguments and arguments[0][:1] != "-":
        from drawloom.graph.spelling import find_nearest

        near = find_nearest(arguments[0], files)
        hint = f"did you mean {near!r}?" if near else f"available: {', '.join(files)}"
        parser.error(f"there is no command {arguments[0]!r}; {hint}")
    parser.parse_args(arguments[:1])
