"""Graphs as plain values."""

from collections.abc import Callable

import pytest

from drawloom.graph.build.graph import Graph
from drawloom.graph.inspect.serialize import escape, flatten, serialize_graph

Shop = Callable[..., Graph]

IN_PLACE = """
[page]
store = { use = "stores.memory", size = 3 }
filters = [{ use = "pages.parse" }, { use = "pages.look_up" }]
[trainer]
named = { "home" = "@page" }
store = "@store"
"""


def test_nodes_in_place_stand_in_the_node_that_owns_them(shop: Shop) -> None:
    """Only nodes with a table of their own are named; the others are tables inside."""
    plain = serialize_graph(shop(IN_PLACE))
    assert list(plain) == ["store", "page", "trainer"]
    assert plain["page"]["store"] == {"use": "stores.memory", "size": 3, "name": "memory"}
    assert plain["trainer"]["named"] == {"home": "@page"}


def test_flat_names_are_those_of_the_graph(shop: Shop) -> None:
    """Flattening gives nodes in place the names that the graph gives them, and leads edges to them."""
    graph = shop(IN_PLACE)
    flat = flatten(serialize_graph(graph))
    assert sorted(flat) == sorted(graph.nodes)
    assert flat["page"]["store"] == "@page.store"
    assert flat["page"]["filters"] == ["@page.filters[0]", "@page.filters[1]"]


@pytest.mark.parametrize("text", ["@x", "$x", "@@x", "x", "", "a@"])
def test_escaping_doubles_a_sigil_at_the_front(text: str) -> None:
    """Text that begins like a reference reads back as text, wherever it stands."""
    escaped = text[0] + text if text[:1] in ("@", "$") else text
    assert escape({"k": [text]}) == {"k": [escaped]}
