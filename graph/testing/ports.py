"""Fakes of ports, which record their calls, and the contract suites that implementations of a port must pass."""

import functools
import importlib
import importlib.util
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import ModuleType
from typing import Any, Literal

import attrs

from drawloom.graph.component import is_port
from drawloom.graph.testing.build import build
from drawloom.graph.testing.misspellings import misspelt
from drawloom.graph.types.port_match import members, mismatches

EMPTY: dict[Any, Callable[[], Any]] = {int: int, float: float, str: str, bool: bool, bytes: bytes, list: list}
EMPTY |= {dict: dict, tuple: tuple, Mapping: dict, set: set, AbstractContextManager: nullcontext}
"""The default return values of a fake's methods, by annotated type: empty or zero."""


@attrs.frozen
class Call:
    """One recorded call of a fake's method, with its arguments by name."""

    method: str
    arguments: dict[str, Any]


def fake(*ports: type, **answers: Any) -> Any:
    """
    An object that implements all of these ports.

    `answers` are values of attributes and return values of methods: a value, or a function that is called with the
    arguments of the method. Everything else is an empty value of the annotated type: 0, "", an empty list, another fake
    for another port, None. `calls` lists the calls of methods as `Call`s. Raises TypeError for a call that the port
    does not allow, and at once for a name that no port has.
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
            space[name] = answers[name] if name in answers else _empty(kind)
    # A class of its own, since ports are matched by class.
    return type(f"Fake{''.join(port.__name__ for port in ports)}", (), space)()


class _Unanswered:
    """Marks a method without an answer; None may be an answer."""


def _method(promised: Callable[..., Any], calls: list[Call], answer: Any) -> Callable[..., Any]:
    signature = inspect.signature(promised)
    kind = typing.get_type_hints(promised).get("return")

    @functools.wraps(promised)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        calls.append(Call(promised.__name__, dict(list(bound.arguments.items())[1:])))
        if answer is _Unanswered:
            return _empty(kind)
        return answer(*args, **kwargs) if callable(answer) else answer

    return method


def _value_type(port: type, name: str, promised: Any) -> Any:
    hints = typing.get_type_hints(promised.fget if isinstance(promised, property) else port)
    return hints.get("return" if isinstance(promised, property) else name, Any)


def _empty(kind: Any) -> Any:
    """An empty value of a type."""
    origin = typing.get_origin(kind) or kind
    if origin in EMPTY:
        return EMPTY[origin]()
    if origin is Literal:
        return typing.get_args(kind)[0]
    if origin in (typing.Union, types.UnionType) and type(None) not in typing.get_args(kind):
        return _empty(typing.get_args(kind)[0])
    if getattr(origin, "_is_protocol", False) and is_port(origin):
        return fake(origin)
    return iter(()) if getattr(origin, "__name__", "") in ("Iterator", "Iterable", "Generator") else None


Property = Callable[..., None]


class BrokenContract(AssertionError):
    """An implementation does not satisfy the contract of its port."""


def expect(holds: object, otherwise: str) -> None:
    """Raise BrokenContract with the message `otherwise` unless `holds` is true."""
    if not holds:
        raise BrokenContract(otherwise)


def contract(port: type) -> list[Property]:
    """The properties of a port's contract; LookupError if the port has none."""
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
    Check an implementation against the contract of a port.

    The implementation is a component (its class or name), which is built with `values` and opened, or a function that
    returns an instance or a context manager of one. Each property gets new instances, which are closed after it. Raises
    BrokenContract for the first property that does not hold, with a note that names the property, and for an attribute
    that resembles an optional member of a port, but has another name.
    """
    for holds in contract(port):
        with ExitStack() as stack:
            instances = [_instance(implementation, values, stack) for _ in inspect.signature(holds).parameters]
            for instance in instances:
                reasons = mismatches(type(instance), port)
                expect(not reasons, f"{type(instance).__name__} is not a {port.__name__}: it {' and '.join(reasons)}")
                expect(not (sentences := misspelt(type(instance), port)), "; ".join(sentences))
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
