"""Checks of contracts on a recipe's nodes."""

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from drawloom import UserError
from drawloom.components import ports
from drawloom.components.proving.run import ProofSource, Values
from drawloom.graph.component import is_port_or_component
from drawloom.graph.testing.ports import BrokenContractError, check_port, load_contract
from drawloom.graph.types.port_match import implements
from drawloom.ports import RunInfo


def list_ports_with_contract(cls: type) -> list[type]:
    """Return the ports with a contract that a component implements."""
    return [port for port in iterate_ports() if implements(cls, port) and has_contract(port)]


def iterate_ports() -> Iterator[type]:
    """Yield every port."""
    for module in pkgutil.iter_modules(ports.__path__):
        for item in vars(importlib.import_module(f"{ports.__name__}.{module.name}")).values():
            if is_port_or_component(item) and item.__module__.endswith(f".{module.name}"):
                yield item


def has_contract(port: type) -> bool:
    """Return whether a port has a contract."""
    try:
        return bool(load_contract(port))
    except LookupError:
        return False


def check_contracts(source: ProofSource, values: Values, node: str, folder: Path) -> tuple[list[str], str]:
    """
    Check a recipe's node against its ports' contracts.

    Return the ports' names, and the first broken property with its reason, or "".
    """
    recipe = source.load(values)
    checked: list[str] = []
    make = _make_opener(source, values, node, folder)
    for port in list_ports_with_contract(recipe.graph.nodes[node].spec.cls):
        try:
            check_port(make, port)
            checked.append(port.__name__)
        except Exception as error:
            kind = "" if isinstance(error, BrokenContractError | UserError) else f"{type(error).__name__}: "
            note = "".join(getattr(error, "__notes__", [])[:1]).partition("\n")[0]
            return checked, f"{note} {kind}{error}"
    return checked, ""


def _make_opener(source: ProofSource, values: Values, node: str, folder: Path) -> Callable[[], Any]:
    """Return a function for opening the node, in another run folder every time."""
    numbers = count()

    @contextmanager
    def open_node() -> Iterator[Any]:
        recipe = source.load(values)
        home = {name: {"folder": str(folder / str(next(numbers)))} for name in recipe.graph.implementers(RunInfo)}
        with recipe.with_values(home, "prove").open(only=node) as nodes:
            yield nodes[node]

    return open_node
