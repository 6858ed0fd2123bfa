"""The parser for a command's arguments."""

import argparse
import math
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import attrs

from drawloom.graph.cli.command import INVALID, Command, list_output_formats
from drawloom.graph.component import Bound, Check
from drawloom.graph.problems import Problem, RecipeError, UserError, did_you_mean
from drawloom.graph.types.assignable import union_members_except_none

C = TypeVar("C", bound=Command)


class Parser(argparse.ArgumentParser):
    """Argument parser whose errors are printed once for several processes."""

    def error(self, message: str) -> NoReturn:
        """Raise a UserError, since argparse requires a method without return."""
        if message.startswith("unrecognized arguments"):
            key = message.partition(": ")[2].partition("=")[0]
            hint = did_you_mean(key, ()) or "set values with node.key=value, such as trainer.steps=10"
            message += f"; {hint}"
        raise UserError(f"{self.format_usage()}{self.prog}: error: {message}", INVALID)


@attrs.frozen
class Argument:
    """A command's argument, as its field declares it with `option`; `kind` is the type for a single value."""

    field: str
    kind: Any
    is_list: bool
    default: Any
    doc: str
    positional: bool
    name: str
    metavar: str
    nargs: str | None
    separator: str
    check: Check | None
    parse: Callable[[str], Any] | None
    needs: str
    exclusive: str

    @property
    def option(self) -> str:
        """The option, such as --dry-run."""
        return self.name or _format_option(self.field)

    @property
    def help(self) -> str:
        """The documentation, with the needed option and the default."""
        needs = f"with {_format_option(self.needs)}: " if self.needs else ""
        values = self.default if isinstance(self.default, tuple) else (self.default,)
        is_shown = all(isinstance(value, str | int | float | Path) for value in values) and self.kind is not bool
        text = ",".join(str(value).removesuffix(".0") for value in values) if is_shown else ""
        return f"{needs}{self.doc}{f' (default: {text})' if text else ''}"

    def parse_word(self, text: str) -> Any:
        """Return a word's value, or its parts' values. Raises ArgumentTypeError with the reason."""
        return [*map(self._parse_value, text.split(self.separator))] if self.separator else self._parse_value(text)

    def _parse_value(self, text: str) -> Any:
        is_number = self.kind in (int, float)
        try:
            value = (self.parse or self.kind)(text)
            reason = "" if is_number and not math.isfinite(value) else self.check(value) if self.check else None
        except ValueError as error:
            reason = str(error)
        if reason is not None:
            raise argparse.ArgumentTypeError(f"{text!r} is not {self._describe_numbers()}" if is_number else reason)
        return value

    def _describe_numbers(self) -> str:
        """Return the accepted numbers, such as `an integer of 4 or more`."""
        noun, bound = "an integer" if self.kind is int else "a number", self.check
        if not isinstance(bound, Bound):
            return noun
        if bound.above is not None:
            return f"{noun} above {bound.above:g}"
        most = f" of at most {bound.below - 1:,}" if bound.below is not None else ""
        return f"a positive integer{most}" if bound.at_least == 1 else f"{noun} of {bound.at_least:g} or more"


def _format_option(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def list_arguments(cls: type) -> Iterator[Argument]:
    """Yield a command's arguments; `--import`, which all commands have, last."""
    hints = typing.get_type_hints(cls, include_extras=True)
    for field in sorted(attrs.fields(cls), key=lambda field: field.name == "imports"):
        if field.metadata:
            kind = union_members_except_none(hints[field.name])[0]
            is_list = typing.get_origin(kind) is Sequence
            kind = typing.get_args(kind)[0] if is_list else kind
            declared = dict(field.metadata)
            if typing.get_origin(kind) is Annotated:
                kind, declared["check"] = typing.get_args(kind)
            yield Argument(field.name, kind, is_list, field.default, **declared)


def make_parser(cls: type[Command], name: str, summary: str) -> Parser:
    """Return the parser for a command's arguments and `--format`."""
    parser = Parser(
        prog=f"drawloom {name}",
        description=summary,
        epilog=cls.epilog,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,  # the class has the defaults
    )
    groups: dict[str, Any] = {"": parser}
    for argument in list_arguments(cls):
        group = argument.exclusive
        groups[group] = groups.get(group) or parser.add_mutually_exclusive_group()
        _add_argument(groups[group], argument)
    if formats := list_output_formats(cls.run):
        help = f"print the result in this format (default: {formats[0]}); with json, all else is on stderr"
        parser.add_argument("--format", choices=formats, default=formats[0], help=help)
    return parser


def _add_argument(parser: Any, argument: Argument) -> None:
    """Add an argument to a parser or a group."""
    words: dict[str, Any] = {"help": argument.help}
    required, nargs = argument.default is attrs.NOTHING, argument.nargs
    if argument.kind is bool:
        words["action"] = "store_true"
    elif typing.get_origin(argument.kind) is Literal:
        words["choices"] = typing.get_args(argument.kind)
    else:
        is_count = argument.kind is int and not argument.positional
        words |= {
            "type": argument.parse_word,
            "metavar": argument.metavar or ("N" if is_count else argument.field.upper()),
        }
    if argument.positional:
        nargs = nargs or ("+" if argument.is_list else None if required else "?")
        words["default"] = None  # argparse would convert SUPPRESS to the type
    else:
        words |= {"dest": argument.field, "required": required}
        if argument.is_list and not (nargs or argument.separator):
            words["action"] = "append"
    if nargs:
        words["nargs"] = nargs
    parser.add_argument(argument.field if argument.positional else argument.option, **words)


def parse_command(
    cls: type[C], name: str, arguments: Sequence[str], words: Sequence[str] = (), summary: str = "", **given: Any
) -> C:
    """
    Return a command with its arguments' values, and its overrides `words`.

    Raises UserError for a wrong argument, and RecipeError if the command accepts no overrides.
    """
    parsed = vars(make_parser(cls, name, summary).parse_args(arguments))
    values = {field: value for field, value in parsed.items() if value is not None}
    if words and not cls.accepts_words:
        raise RecipeError([Problem("DL110", f"the command {name} accepts no overrides such as {words[0]!r}")])
    for argument in list_arguments(cls):
        if argument.field in values and argument.needs and argument.needs not in values:
            needed = _format_option(argument.needs)
            raise UserError(f"{argument.option} needs {needed}; add {needed}, or leave {argument.option} out", INVALID)
    return cls(**values, words=words, **given)
