"""Contracts of ports."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from drawloom.graph.testing import BrokenContract, check_port
from drawloom.graph.testing.contract import contract, contract_name
from support.shop.components.stores.disk import Disk
from support.shop.components.stores.memory import Memory
from support.shop.ports import Page, Store


class Forgetful:
    """A third party's store that keeps nothing."""

    def get(self, key: str) -> Any:
        return None

    def put(self, key: str, value: Any) -> None: ...


class Common(Memory):
    """A store that shares what it keeps with all others."""

    shared: ClassVar[dict[str, Any]] = {}

    def get(self, key: str) -> Any:
        return self.shared[key]

    def put(self, key: str, value: Any) -> None:
        self.shared[key] = value


def test_a_good_implementation_passes(tmp_path: Path) -> None:
    """A component by name, by class, and any function that makes an instance."""
    check_port("stores.memory", Store, package="support.shop")
    check_port(Memory, Store, size=3)
    check_port(lambda: Memory(), Store)


@pytest.mark.parametrize(
    ("implementation", "text", "note"),
    [
        (Forgetful, "is another when it is got", "A value comes back under its key."),
        (lambda: Common(), "has what was put into another", "What is put into one store is not in another."),
        (object, "object is no Store: it has no get() and has no put()", ""),
    ],
)
def test_a_bad_one_is_told_which_property_it_breaks(implementation: Any, text: str, note: str) -> None:
    """The message says what was seen, the note what was promised."""
    with pytest.raises(BrokenContract, match=text.replace("(", r"\(").replace(")", r"\)")) as caught:
        check_port(implementation, Store)
    assert not note or caught.value.__notes__ == [f"Store: {note}"]


def test_instances_are_opened_and_closed(tmp_path: Path) -> None:
    """Each property sees open instances of its own, and leaves them closed."""
    made: list[Disk] = []

    def make() -> Disk:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Disk(folder=folder))
        return made[-1]

    check_port(make, Store)
    assert len(made) == 3 and all(disk.journal == ["open", "close"] for disk in made)


def test_a_context_manager_may_stand_around_an_instance() -> None:
    """A part of a recipe that is open is put to a contract, too."""
    left: list[bool] = []

    @contextmanager
    def around() -> Iterator[Memory]:
        yield Memory()
        left.append(True)

    check_port(around, Store)
    assert left == [True] * 3


def test_a_port_without_a_contract_is_told() -> None:
    """Nobody is told that all is well where nothing was looked at."""
    with pytest.raises(LookupError, match=r"Page has no contract: support\.shop\.contracts\.page is missing"):
        check_port("pages.plain", Page, package="support.shop")
    assert [holds.__name__ for holds in contract(Store)] == ["what_is_put_is_there", "stores_share_nothing"]
    assert contract_name(type("HeldOutData", (), {"__module__": "a.ports.data"})) == "a.contracts.held_out_data"
