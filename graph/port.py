"""Ports: what components promise one another, and the kinds of fields that take more than one of them."""

import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")
P = TypeVar("P")


@overload
def port(cls: type[T], /) -> type[T]: ...
@overload
def port(*, named: bool = False) -> Callable[[type[T]], type[T]]: ...
def port(cls: Any = None, /, *, named: bool = False) -> Any:
    """
    Mark a class, most often a Protocol, as something that components promise one another.

    A component's field of this type is an edge. `named` says that nodes which fit it are known by their names, so
    that they can't be written in place.
    """

    def mark(cls: type[T]) -> type[T]:
        cls.__port__ = {"named": named}  # type: ignore[attr-defined]
        return cls

    return mark if cls is None else mark(cls)


def is_port(kind: object) -> bool:
    """Whether fields of this type are edges: ports, and component classes themselves."""
    kind = typing.get_origin(kind) or kind
    return isinstance(kind, type) and bool({"__port__", "__component__"} & vars(kind).keys())


def is_named(kind: type) -> bool:
    """Whether nodes that fit this port must have a table, and so a name, of their own."""
    return bool(vars(kind).get("__port__", {}).get("named"))


class Every(Mapping[str, P], Generic[P]):
    """Every built node that fits a port, by node name. The container fills it when all is built; it is no edge."""

    def __init__(self, members: Mapping[str, P] | None = None) -> None:
        self._members: dict[str, P] = dict(members or {})

    def fill(self, members: Mapping[str, P]) -> None:
        """Called once, by the container."""
        self._members = dict(members)

    def __getitem__(self, name: str) -> P:
        return self._members[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)


class Ordered(tuple[P, ...]):
    """Members of a sequence edge, in the order of the recipe; what each reads, writes and changes is checked."""

    names: tuple[str, ...]

    def __new__(cls, members: Sequence[P] = (), names: Sequence[str] = ()) -> "Ordered[P]":
        self = super().__new__(cls, tuple(members))
        self.names = tuple(names) or tuple(type(member).__name__ for member in members)
        return self
