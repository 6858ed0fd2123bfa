"""Fakes and contracts of ports."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import pytest

from drawloom.graph.component import port
from drawloom.graph.testing import BrokenContractError, Call, check_port, fake
from drawloom.graph.testing.ports import contract_module_name, load_contract
from drawloom.graph.types.port_match import find_mismatches
from support.shop.components.stores.disk import Disk
from support.shop.components.stores.memory import Memory
from support.shop.ports import Counted, Page, Store


@port
class Rich(Protocol):
    """Port with members of many types."""

    name: str
    choice: Literal["a", "b"]

    @property
    def page(self) -> Page: ...

    def texts(self) -> list[str]: ...

    def either(self) -> int | str: ...

    def maybe(self) -> int | None: ...

    def items(self) -> Iterator[int]: ...

    def secret(self) -> complex: ...


@port
@runtime_checkable
class Flushes(Protocol):
    """Port of objects with a `flush` method."""

    def flush(self) -> None: ...


class Log:
    """Implementation of Flushes that does not inherit from it."""

    def flush(self) -> None: ...


def test_a_port_may_be_checked_at_run_time() -> None:
    """isinstance and issubclass look at a port's members only, not at the mark of a port."""
    assert isinstance(Log(), Flushes) and issubclass(Log, Flushes)
    assert not isinstance(object(), Flushes) and not issubclass(Path, Flushes)


@pytest.mark.parametrize("kind", [Store, Page, Counted, Rich])
def test_a_fake_fits_its_port(kind: type) -> None:
    """A fake passes the check that every component passes."""
    assert find_mismatches(type(fake(kind)), kind) == []


def test_a_fake_fits_several_ports() -> None:
    """One fake implements several ports."""
    both = fake(Page, Counted, count=3)
    assert find_mismatches(type(both), Page) == find_mismatches(type(both), Counted) == [] and both.count == 3


def test_calls_are_remembered_by_name() -> None:
    """Recorded arguments have the parameter names of the port, whether passed by position or by keyword."""
    store = fake(Store)
    store.put("a", value=1)
    store.get(key="a")
    assert store.calls == [Call("put", {"key": "a", "value": 1}), Call("get", {"key": "a"})]
    assert fake(Store).calls == []


def test_answers_are_values_or_functions() -> None:
    """A method returns its answer, or the result of the answer called with the arguments."""
    store = fake(Store, get=lambda key: key * 2)
    assert store.get("ab") == "abab" and fake(Store, get=3).get("x") == 3


def test_a_method_without_an_answer_returns_an_empty_value() -> None:
    """A method without an answer returns zero, an empty text or list, the first choice, or a fake."""
    rich = fake(Rich)
    assert (rich.name, rich.choice, rich.texts(), rich.either(), rich.maybe(), list(rich.items())) == (
        "",
        "a",
        [],
        0,
        None,
        [],
    )
    assert rich.page.answer("x") == ""
    with pytest.raises(TypeError, match=r"the fake of Rich has no secret; write fake\(Rich, secret=...\)"):
        rich.secret()
    assert fake(Rich, secret=1j).secret() == 1j


def test_names_and_calls_that_the_port_lacks_are_refused() -> None:
    """A call or an answer that the port does not declare is a TypeError."""
    with pytest.raises(TypeError, match="too many positional arguments"):
        fake(Store).get("a", "b")
    with pytest.raises(TypeError, match="Store has no member fetch; available: get, put"):
        fake(Store, fetch=3)


class Forgetful:
    """A store that forgets every value."""

    def get(self, key: str) -> Any:
        return None

    def put(self, key: str, value: Any) -> None: ...


class Common(Memory):
    """A store with values shared by all instances."""

    shared: ClassVar[dict[str, Any]] = {}

    def get(self, key: str) -> Any:
        return self.shared[key]

    def put(self, key: str, value: Any) -> None:
        self.shared[key] = value


def test_a_good_implementation_passes(tmp_path: Path) -> None:
    """A contract accepts a component by name or class, or a function that returns an instance."""
    check_port("stores.memory", Store, package="support.shop")
    check_port(Memory, Store, size=3)
    check_port(lambda: Memory(), Store)


@pytest.mark.parametrize(
    ("implementation", "text", "note"),
    [
        (Forgetful, "is another when it is got", "A value comes back under its key."),
        (lambda: Common(), "has what was put into another", "A value put into one store is not in another."),
        (object, "object is not a Store: it has no get() and no put()", ""),
    ],
)
def test_a_broken_implementation_fails_and_the_error_names_the_property(
    implementation: Any, text: str, note: str
) -> None:
    """The message states the observation, and the note names the property."""
    with pytest.raises(BrokenContractError, match=text.replace("(", r"\(").replace(")", r"\)")) as caught:
        check_port(implementation, Store)
    assert not note or caught.value.__notes__ == [f"Store: {note}"]


def test_instances_are_opened_and_closed(tmp_path: Path) -> None:
    """Every property gets its own open instances, which are closed afterwards."""
    disks: list[Disk] = []

    def make() -> Disk:
        folder = tmp_path / str(len(disks))
        folder.mkdir()
        disks.append(Disk(folder=folder))
        return disks[-1]

    check_port(make, Store)
    assert len(disks) == 3 and all(disk.journal == ["open", "close"] for disk in disks)


def test_an_instance_may_come_from_a_context_manager() -> None:
    """A contract accepts a context manager, such as an open recipe, and closes it per property."""
    exits: list[bool] = []

    @contextmanager
    def open_memory() -> Iterator[Memory]:
        yield Memory()
        exits.append(True)

    check_port(open_memory, Store)
    assert exits == [True] * 3


def test_a_port_without_a_contract_is_a_lookup_error() -> None:
    """A port without properties raises LookupError instead of passing."""
    with pytest.raises(LookupError, match=r"Page has no contract: support\.shop\.contracts has no"):
        check_port("pages.plain", Page, package="support.shop")
    assert [holds.__name__ for holds in load_contract(Store)] == ["what_is_put_is_there", "stores_share_nothing"]
    assert contract_module_name(type("Corpus", (), {"__module__": "a.ports.data"})) == "a.contracts.data"
