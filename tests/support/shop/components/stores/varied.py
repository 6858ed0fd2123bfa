"""A store with a setting of every type."""

from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import attrs

from drawloom.graph import above, at_least, component, setting


class Colour(Enum):
    """Colours of a store."""

    RED = "red"
    BLUE = "blue"


@attrs.frozen
class Shelf:
    """A section of a store."""

    width: int = setting(doc="in cm", check=at_least(1))
    name: str | None = setting(default=None, doc="label")
    books: list[str] = setting(factory=list, doc="titles")


@component
class Varied:
    """An empty store with many settings."""

    text: str = setting(default="text", doc="a text")
    whole: int = setting(default=1, doc="an integer")
    part: float = setting(default=0.5, doc="a number", check=above(0))
    flag: bool = setting(default=False, doc="yes or no", impact="safe")
    path: Path = setting(default=Path("here"), doc="a path")
    moment: datetime | None = setting(default=None, doc="a moment")
    day: date | None = setting(default=None, doc="a day")
    hour: time | None = setting(default=None, doc="a time of day")
    choice: Literal["one", 2, True] = setting(default="one", doc="one of three")
    colour: Colour = setting(default=Colour.RED, doc="a colour", impact="incompatible")
    either: int | Literal["rest"] = setting(default="rest", doc="a number or the rest")
    texts: list[str] = setting(factory=list, doc="texts")
    pair: tuple[int, float] = setting(default=(1, 2.0), doc="two numbers")
    numbers: tuple[int, ...] = setting(default=(), doc="numbers")
    table: dict[str, float] = setting(factory=dict, doc="numbers by name")
    shelf: Shelf | None = setting(default=None, doc="a shelf")
    shelves: Sequence[Shelf] = setting(factory=list, doc="shelves")
    named: Mapping[str, list[Shelf]] = setting(factory=dict, doc="shelves by name")
    anything: Any = setting(default=None, doc="anything at all")

    def get(self, key: str) -> Any:
        raise KeyError(key)

    def put(self, key: str, value: Any) -> None: ...
