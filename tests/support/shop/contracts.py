"""Behaviour promised by the shop's ports."""

from drawloom.graph.testing import expect
from support.shop.ports import Store


def what_is_put_is_there(store: Store) -> None:
    """A value comes back under its key."""
    store.put("key", "value")
    expect(store.get("key") == "value", "a value that was put is another when it is got")


def stores_share_nothing(first: Store, second: Store) -> None:
    """A value put into one store is not in another."""
    first.put("key", "one")
    second.put("key", "other")
    expect(first.get("key") == "one", "a store has what was put into another")


def _helper() -> None:
    raise AssertionError("what is private is no property")
