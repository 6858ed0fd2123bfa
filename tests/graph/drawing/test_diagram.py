"""Boxes and arrows for a graph, and values in a sequence."""

from collections.abc import Callable

import pytest

from drawloom.graph.drawing.diagram import Arrow, ValueTrace, make_sequence_drawing, make_wiring_diagram
from drawloom.graph.problems import UserError
from drawloom.graph.wiring.graph import Graph

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


def test_edges_between_two_nodes_are_one_arrow(shop: Callable[..., Graph]) -> None:
    """Several fields with edges to one node are one arrow with all field names."""
    picture = make_wiring_diagram(shop(TWO), "shop", "trainer")
    assert set(picture.arrows) == {
        Arrow("trainer", "page", ("pages", "named")),
        Arrow("trainer", "store", ("store",)),
        Arrow("trainer", "other", ("named",)),
        Arrow("page", "page.store", ("store",)),
        Arrow("page", "other", ("fallback",)),
        Arrow("other", "other.store", ("store",)),
    }
    assert len(picture.arrows) == 6


def test_unbuilt_nodes_are_not_drawn(shop: Callable[..., Graph]) -> None:
    """The boxes are the root and the nodes that it needs, the root first."""
    names = [box.name for box in make_wiring_diagram(shop(TWO), "shop", "trainer").boxes]
    assert names[0] == "trainer" and sorted(names) == sorted(shop(TWO).topological_order(["trainer"]))
    assert "spare" not in names


def test_a_focused_diagram_has_needs_and_users_of_the_node(shop: Callable[..., Graph]) -> None:
    """With a focus, users have arrows to the focused node only, and their other needs are left out."""
    picture = make_wiring_diagram(shop(TWO), "shop", "trainer", "other")
    assert [box.name for box in picture.boxes] == ["page", "trainer", "other", "other.store"]
    assert {(arrow.source, arrow.target) for arrow in picture.arrows} == {
        ("page", "other"),
        ("trainer", "other"),
        ("other", "other.store"),
    }


def test_a_large_graph_is_drawn_completely(first_run: Graph) -> None:
    """A large graph has one box per built node and one arrow per node and need."""
    picture = make_wiring_diagram(first_run, "first_run", "trainer")
    built = first_run.topological_order(["trainer"])
    assert {box.name for box in picture.boxes} == set(built) and len(picture.boxes) == len(built) > 35
    assert len(picture.arrows) == sum(len(first_run.needs(name)) for name in built)


FILTERS = """
[parse]
use = "pages.parse"
[translate]
use = "pages.translate"
[look_up]
use = "pages.look_up"
[page]
filters = ["@parse", "@translate", "@look_up"]
"""


def test_a_value_lists_its_accesses_by_members(shop: Callable[..., Graph]) -> None:
    """Every value has a row with its accesses, marked if no member writes the value."""
    step = make_sequence_drawing(shop(FILTERS), "shop", "page")
    assert [box.name for box in step.members] == ["parse", "translate", "look_up"]
    assert step.traces == (
        ValueTrace("words", {0: "writes", 1: "changes", 2: "reads"}),
        ValueTrace("user", {2: "reads"}),
    )
    assert [trace.title for trace in step.traces] == ["words", "user (not written)"]


def test_arrows_start_at_the_last_member_that_wrote_or_changed_a_value(shop: Callable[..., Graph]) -> None:
    """An arrow starts at the last member that wrote or changed the value before the reader."""
    picture = make_sequence_drawing(shop(FILTERS), "shop", "page").diagram()
    assert picture.arrows == (Arrow("parse", "translate", ("words",)), Arrow("translate", "look_up", ("words",)))


def test_a_large_step_has_every_value(first_run: Graph) -> None:
    """A step has an access for every value that its members declare."""
    step = make_sequence_drawing(first_run, "first_run", "trainer")
    flows = [first_run.nodes[box.name].spec.traits.flow for box in step.members]
    declared = sum(len(flow.reads) + len(flow.writes) + len(flow.changes) for flow in flows)
    assert sum(len(trace.access_by_member) for trace in step.traces) == declared > 15
    assert step.title == "first_run: [trainer] phases"


def test_a_step_of_a_node_without_a_sequence_is_a_user_error(shop: Callable[..., Graph]) -> None:
    """A node without a sequence edge, or with an empty one, is a user error."""
    for name in ("trainer", "page"):
        with pytest.raises(UserError, match="no sequence edge"):
            make_sequence_drawing(shop(), "shop", name)
