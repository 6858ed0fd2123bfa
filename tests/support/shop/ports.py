"""Ports of the shop's components."""

from typing import Any, Protocol

from drawloom.graph import port


@port
class Store(Protocol):
    """Keeps values."""

    def get(self, key: str) -> Any: ...

    def put(self, key: str, value: Any) -> None: ...


@port
class Page(Protocol):
    """Answers requests."""

    def answer(self, request: str) -> str: ...


@port(named=True)
class Counted(Protocol):
    """Counts requests."""

    @property
    def count(self) -> int: ...


@port
class Filter(Protocol):
    """Changes a request on its way."""

    def apply(self, request: str) -> str: ...
