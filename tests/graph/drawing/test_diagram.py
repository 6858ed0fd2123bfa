"""What there is to draw."""

from collections.abc import Callable

from drawloom.graph.build.graph import Graph
from drawloom.graph.drawing.diagram import Arrow, wiring

TWO = """
[page]
fallback = "@other"
[other]
use = "pages.plain"
title = "Other"
[spare]
use = "stores.memory"
[trainer]
store = "@store"
named = { a = "@page", b = "@other" }
[page.store]
use = "stores.memory"
[other.store]
use = "stores.memory"
"""


def test_every_edge_is_an_arrow_once(shop: Callable[..., Graph]) -> None:
    """Several fields that lead to one node are one arrow with all their names."""
    picture = wiring(shop(TWO), "shop", "trainer")
    assert set(picture.arrows) == {
        Arrow("trainer", "page", ("pages", "named")),
        Arrow("trainer", "store", ("store",)),
        Arrow("trainer", "other", ("named",)),
        Arrow("page", "page.store", ("store",)),
        Arrow("page", "other", ("fallback",)),
        Arrow("other", "other.store", ("store",)),
    }
    assert len(picture.arrows) == 6


def test_what_is_not_built_is_not_drawn(shop: Callable[..., Graph]) -> None:
    """The boxes are those that the root needs, itself first."""
    names = [box.name for box in wiring(shop(TWO), "shop", "trainer").boxes]
    assert names[0] == "trainer" and sorted(names) == sorted(shop(TWO).topological_order(["trainer"]))
    assert "spare" not in names


def test_around_a_node_stand_what_it_needs_and_who_uses_it(shop: Callable[..., Graph]) -> None:
    """With a focus, users lead to it alone, and what else they need is left out."""
    picture = wiring(shop(TWO), "shop", "trainer", "other")
    assert [box.name for box in picture.boxes] == ["page", "trainer", "other", "other.store"]
    assert {(arrow.source, arrow.target) for arrow in picture.arrows} == {
        ("page", "other"),
        ("trainer", "other"),
        ("other", "other.store"),
    }


def test_all_of_a_large_graph_is_there(first_run: Graph) -> None:
    """As many boxes as are built, and as many arrows as there are pairs of a node and a need."""
    picture = wiring(first_run, "first_run", "trainer")
    built = first_run.topological_order(["trainer"])
    assert {box.name for box in picture.boxes} == set(built) and len(picture.boxes) == len(built) > 35
    assert len(picture.arrows) == sum(len(first_run.needs(name)) for name in built)
