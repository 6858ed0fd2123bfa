"""What the shop's ports promise of behaviour."""

from drawloom.graph.testing import expect
from support.shop.ports import Store


def what_is_put_is_there(store: Store) -> None:
    """A value comes back under its key."""
    store.put("key", "value")
    expect(store.get("key") == "value", "a value that was put is another when it is got")


def stores_share_nothing(one: Store, other: Store) -> None:
    """What is put into one store is not in another."""
    one.put("key", "one")
    other.put("key", "other")
    expect(one.get("key") == "one", "a store has what was put into another")


def _helper() -> None:
    raise AssertionError("what is private is no property")
