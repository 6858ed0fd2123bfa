"""Objects that keep the promises of a port, remember how they were called, and do nothing else."""

import functools
import importlib
import importlib.util
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import ModuleType
from typing import Any, Literal

import attrs

from drawloom.graph.testing.build import build
from drawloom.graph.types.port_match import members, mismatches

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


Property = Callable[..., None]


class BrokenContract(AssertionError):
    """An implementation does not do what its port promises."""


def expect(holds: object, otherwise: str) -> None:
    """Raise BrokenContract, saying what is so `otherwise`, unless it holds."""
    if not holds:
        raise BrokenContract(otherwise)


def contract(port: type) -> list[Property]:
    """The properties of a port's contract; a LookupError if nobody wrote one."""
    name = contract_module(port)
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        found = None
    properties = _properties(importlib.import_module(name), port) if found else []
    if not properties:
        raise LookupError(f"{port.__name__} has no contract: {name} has no function that takes one")
    return properties


def contract_module(port: type) -> str:
    """The module with the contracts of the ports of a module: `a.contracts.data` for those of `a.ports.data`."""
    return re.sub(r"\.ports(?=\.|$)", ".contracts", port.__module__)


def _properties(module: ModuleType, port: type) -> list[Property]:
    """The public functions of a module whose first parameter is annotated with the port."""
    functions = [item for name, item in vars(module).items() if inspect.isfunction(item) and name[0] != "_"]
    own = [function for function in functions if function.__module__ == module.__name__]
    return [function for function in own if next(iter(typing.get_type_hints(function).values()), None) is port]


def check_port(implementation: str | type | Callable[[], Any], port: type, /, **values: Any) -> None:
    """
    Put an implementation to the contract of a port.

    It is a component, by class or by name, which is built with `values` and opened, or a function that makes an
    instance, or a context manager around one. Each property gets fresh instances, and sees them closed. Raises
    BrokenContract for the first property that does not hold, with a note that says which.
    """
    for holds in contract(port):
        with ExitStack() as stack:
            instances = [_instance(implementation, values, stack) for _ in inspect.signature(holds).parameters]
            for instance in instances:
                reasons = mismatches(type(instance), port)
                expect(not reasons, f"{type(instance).__name__} is no {port.__name__}: it {' and '.join(reasons)}")
            try:
                holds(*instances)
            except Exception as error:
                error.add_note(f"{port.__name__}: {inspect.getdoc(holds)}")
                raise


def _instance(implementation: Any, values: dict[str, Any], stack: ExitStack) -> Any:
    is_component = isinstance(implementation, str) or "__component__" in vars(implementation)
    made = build(implementation, **values) if is_component else implementation(**values)
    if hasattr(made, "__enter__"):
        return stack.enter_context(made)
    if hasattr(made, "close"):
        stack.callback(made.close)
    if hasattr(made, "open"):
        made.open()
    return made
