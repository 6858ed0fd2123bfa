"""Objects that keep the promises of a port, remember how they were called, and do nothing else."""

import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal

import attrs

from drawloom.graph.types.port_match import members

NOTHING: dict[Any, Callable[[], Any]] = {int: int, float: float, str: str, bool: bool, bytes: bytes, list: list}
NOTHING |= {dict: dict, tuple: tuple, Mapping: dict, set: set}
"""What a method gives that says of what type, but not what: nothing of it."""


@attrs.frozen
class Call:
    """One call of a fake's method, with its arguments by name."""

    method: str
    arguments: dict[str, Any]


def fake(*ports: type, **answers: Any) -> Any:
    """
    An object that fits every one of these ports.

    `answers` are the values of members, and what methods give: a value, or a function that is called with what the
    method is called with. All else gives nothing of the type that the port promises: 0, "", an empty list, another
    fake for another port, None. `calls` lists the calls of its methods, as `Call`s; a call that the port does not
    allow raises a TypeError. A member that no port has raises a TypeError at once.
    """
    known = {name: port for port in ports for name in members(port)}
    unknown = answers.keys() - known.keys()
    if unknown:
        names = " and ".join(port.__name__ for port in ports)
        raise TypeError(f"{names} has no {', '.join(sorted(unknown))}; there is {', '.join(sorted(known))}")
    calls: list[Call] = []
    space: dict[str, Any] = {"calls": calls, "__annotations__": {}}
    for name, port in known.items():
        promised = inspect.getattr_static(port, name, None)
        if inspect.isfunction(promised):
            space[name] = _method(promised, calls, answers.get(name, _Unanswered))
        else:
            space["__annotations__"][name] = kind = _value_type(port, name, promised)
            space[name] = answers[name] if name in answers else _nothing(kind)
    return type(f"Fake{''.join(port.__name__ for port in ports)}", (), space)()


class _Unanswered:
    """What is asked for that nobody said anything of."""


def _method(promised: Callable[..., Any], calls: list[Call], answer: Any) -> Callable[..., Any]:
    signature = inspect.signature(promised)
    kind = typing.get_type_hints(promised).get("return")

    @functools.wraps(promised)
    def method(self: Any, *places: Any, **names: Any) -> Any:
        bound = signature.bind(self, *places, **names)
        calls.append(Call(promised.__name__, dict(list(bound.arguments.items())[1:])))
        if answer is _Unanswered:
            return _nothing(kind)
        return answer(*places, **names) if callable(answer) else answer

    return method


def _value_type(port: type, name: str, promised: Any) -> Any:
    hints = typing.get_type_hints(promised.fget if isinstance(promised, property) else port)
    return hints.get("return" if isinstance(promised, property) else name, Any)


def _nothing(kind: Any) -> Any:
    """A value that says nothing, of a type."""
    origin = typing.get_origin(kind) or kind
    if origin in NOTHING:
        return NOTHING[origin]()
    if origin is Literal:
        return typing.get_args(kind)[0]
    if origin in (typing.Union, types.UnionType) and type(None) not in typing.get_args(kind):
        return _nothing(typing.get_args(kind)[0])
    if getattr(origin, "_is_protocol", False) and "__port__" in vars(origin):
        return fake(origin)
    return iter(()) if getattr(origin, "__name__", "") in ("Iterator", "Iterable", "Generator") else None
