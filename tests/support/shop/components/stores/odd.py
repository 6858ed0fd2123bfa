"""A store with settings no recipe can write, and whose methods fail."""

from collections.abc import Iterator
from typing import Any

from drawloom.graph import Problem, component, setting


@component
class Odd:
    """Keeps nothing."""

    number: complex = setting("no number of TOML", default=1j)
    fails: bool = setting("whether its constraints fail", default=False)

    def get(self, key: str) -> Any:
        raise KeyError(key)

    def put(self, key: str, value: Any) -> None: ...

    @classmethod
    def constraints(cls, node: Any) -> Iterator[Problem]:
        """Fail, if configured to; else report a problem."""
        if node.settings["fails"]:
            raise ZeroDivisionError("by nothing")
        yield node.warning("number", "an odd store", "use another")
