"""
Contracts: what a port's author promises of behaviour, as properties that any implementation can be put to.

The contract of a port is a module beside the package of ports: that of `package.ports.data.Tokenizer` is
`package.contracts.tokenizer`. Each public function in it is one property, said in its docstring; it takes as many
instances as it has parameters, all made alike, and calls `expect`.
"""

import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import Any

from drawloom.graph.testing.build import build
from drawloom.graph.types.port_match import mismatches

Property = Callable[..., None]


class BrokenContract(AssertionError):
    """An implementation does not do what its port promises."""


def expect(holds: object, otherwise: str) -> None:
    """Raise BrokenContract, saying what is so `otherwise`, unless it holds."""
    if not holds:
        raise BrokenContract(otherwise)


def contract(port: type) -> list[Property]:
    """The properties of a port's contract; a LookupError if nobody wrote one."""
    name = contract_name(port)
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise LookupError(f"{port.__name__} has no contract: {name} is missing")
    return _properties(importlib.import_module(name))


def contract_name(port: type) -> str:
    """The module that holds a port's contract, if there is one."""
    snake = re.sub(r"(?<!^)(?=[A-Z])", "_", port.__name__).lower()
    package = re.sub(r"\.ports(\..*)?$", "", port.__module__)
    return f"{package}.contracts.{snake}"


def _properties(module: ModuleType) -> list[Property]:
    functions = [item for name, item in vars(module).items() if inspect.isfunction(item) and name[0] != "_"]
    return [function for function in functions if function.__module__ == module.__name__]


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
