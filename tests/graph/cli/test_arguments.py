"""Arguments of commands, from the fields of a class."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jsonschema
import pytest

from drawloom.graph.cli.arguments import parse_command
from drawloom.graph.cli.command import Command, Count, argument, command, option
from drawloom.graph.cli.schemas import format_words, make_arguments_schema
from drawloom.graph.component import above
from drawloom.graph.problems import UserError
from drawloom.graph.project import Project


@command
class SendCommand(Command):
    """A command with an argument of every kind."""

    text: str = argument("text to send")
    to: Sequence[Path] = option("boxes of the receivers")
    folder: Path = argument("folder of the letters", default=Path("letters"))
    copies: Count = option("number of copies", default=1)
    weight: float | None = option("weight", check=above(0))
    stamp: Literal["red", "blue"] = option("colour of the stamp", default="red")
    by_plane: bool = option("send it by plane", exclusive="way")
    by_ship: bool = option("send it by ship", exclusive="way")
    line: str = option("name of the airline", default="", needs="by_plane")
    notes: Sequence[str] = option("note", default=(), name="--note")
    days: Sequence[int] = option("days of the week", default=(1, 2), separator=",")
    stops: Sequence[str] = option("towns on the way", default=(), nargs="+")

    def run(self, project: Project) -> None:
        """Do nothing."""


VALUES: dict[str, Any] = {
    "text": "hello",
    "to": ["a", "b"],
    "folder": "old",
    "copies": 3,
    "weight": 0.5,
    "stamp": "blue",
    "by_plane": True,
    "line": "fast",
    "notes": ["-", "x y"],
    "days": [3, 4],
    "stops": ["Rome", "Oslo"],
}


def send(*words: str) -> SendCommand:
    """Parse a command line."""
    return parse_command(SendCommand, "send", words)


@pytest.mark.parametrize("names", [["text", "to"], [*VALUES]])
def test_arguments_by_name_have_the_words_that_parse_to_them(names: list[str]) -> None:
    """Arguments valid by the schema, formatted as words and parsed, are the same; all others have their defaults."""
    values = {name: VALUES[name] for name in names}
    jsonschema.validate(values, make_arguments_schema(SendCommand))
    parsed = send(*format_words(SendCommand, values))
    paths = {"to": [Path("a"), Path("b")], **({"folder": Path("old")} if "folder" in values else {})}
    assert {name: getattr(parsed, name) for name in values} == {**values, **paths}
    rest = (
        parsed.folder,
        parsed.copies,
        parsed.weight,
        parsed.stamp,
        parsed.by_ship,
        list(parsed.days),
        list(parsed.notes),
    )
    assert len(names) > 2 or rest == (Path("letters"), 1, None, "red", False, [1, 2], [])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--copies=0"], "argument --copies: '0' is not a positive integer"),
        (["--copies=2.5"], "argument --copies: '2.5' is not a positive integer"),
        (["--weight=nan"], "argument --weight: 'nan' is not a number above 0"),
        (["--days=1,x"], "argument --days: 'x' is not an integer"),
        (["--stamp=green"], "argument --stamp: invalid choice: 'green' (choose from 'red', 'blue')"),
        (["--by-plane", "--by-ship"], "argument --by-ship: not allowed with argument --by-plane"),
        (["--line=fast"], "--line needs --by-plane; add --by-plane, or leave --line out"),
    ],
)
def test_a_refused_argument_is_named_with_the_accepted_values(words: list[str], reason: str) -> None:
    """The message has the option, the word and what to write instead."""
    with pytest.raises(UserError) as caught:
        send("hello", "--to=a", *words)
    assert str(caught.value).endswith(reason) and caught.value.exit_code == 2
