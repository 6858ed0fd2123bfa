"""One walk through a sequence."""

from collections.abc import Callable

import pytest

from drawloom.graph.build.graph import Graph
from drawloom.graph.drawing.diagram import Arrow
from drawloom.graph.drawing.step import Thread, step_of
from drawloom.graph.problems import UserError

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


def test_threads_say_what_members_do(shop: Callable[..., Graph]) -> None:
    """A value that nothing writes is a thread of its own, which says so."""
    step = step_of(shop(FILTERS), "shop", "page")
    assert [box.name for box in step.members] == ["parse", "translate", "look_up"]
    assert step.threads == (
        Thread("words", {0: "writes", 1: "changes", 2: "reads"}),
        Thread("user", {2: "reads"}),
    )
    assert [thread.title for thread in step.threads] == ["words", "user (not written)"]


def test_arrows_lead_from_the_last_that_touched_a_value(shop: Callable[..., Graph]) -> None:
    """What is read is as the last to change it left it."""
    picture = step_of(shop(FILTERS), "shop", "page").picture()
    assert picture.arrows == (Arrow("parse", "translate", ("words",)), Arrow("translate", "look_up", ("words",)))


def test_every_value_of_a_large_step_is_a_thread(first_run: Graph) -> None:
    """As many touches as the components declare."""
    step = step_of(first_run, "first_run", "trainer")
    flows = [first_run.nodes[box.name].spec.traits.flow for box in step.members]
    declared = sum(len(flow.reads) + len(flow.writes) + len(flow.changes) for flow in flows)
    assert sum(len(thread.touches) for thread in step.threads) == declared > 15
    assert step.title == "first_run: [trainer] phases"


def test_a_node_without_a_sequence_is_a_sentence(shop: Callable[..., Graph]) -> None:
    """Neither a field that takes no sequence, nor an empty one, is a step."""
    for name in ("trainer", "page"):
        with pytest.raises(UserError, match="no sequence"):
            step_of(shop(), "shop", name)
