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

    width: int = setting("in cm", check=at_least(1))
    name: str | None = setting("label", default=None)
    books: list[str] = setting("titles", factory=list)


@component
class Varied:
    """An empty store with many settings."""

    text: str = setting("a text", default="text")
    whole: int = setting("an integer", default=1)
    part: float = setting("a number", default=0.5, check=above(0))
    flag: bool = setting("yes or no", default=False, impact="safe")
    path: Path = setting("a path", default=Path("here"))
    moment: datetime | None = setting("a moment", default=None)
    day: date | None = setting("a day", default=None)
    hour: time | None = setting("a time of day", default=None)
    choice: Literal["one", 2, True] = setting("one of three", default="one")
    colour: Colour = setting("a colour", default=Colour.RED, impact="incompatible")
    either: int | Literal["rest"] = setting("a number or the rest", default="rest")
    texts: list[str] = setting("texts", factory=list)
    pair: tuple[int, float] = setting("two numbers", default=(1, 2.0))
    numbers: tuple[int, ...] = setting("numbers", default=())
    table: dict[str, float] = setting("numbers by name", factory=dict)
    shelf: Shelf | None = setting("a shelf", default=None)
    shelves: Sequence[Shelf] = setting("shelves", factory=list)
    named: Mapping[str, list[Shelf]] = setting("shelves by name", factory=dict)
    anything: Any = setting("anything at all", default=None)

    def get(self, key: str) -> Any:
        raise KeyError(key)

    def put(self, key: str, value: Any) -> None: ...
