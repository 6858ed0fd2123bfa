"""The order of a sequence edge."""

from collections.abc import Callable

import pytest

from drawloom.graph.build.graph import Graph

FILTERS = """
[parse]
use = "pages.parse"
[translate]
use = "pages.translate"
[look_up]
use = "pages.look_up"
[log_in]
use = "pages.log_in"
[page]
filters = [{}]
"""


def texts(shop: Callable[..., Graph], *names: str) -> list[str]:
    """What is wrong with these filters in this order."""
    graph = shop(FILTERS.format(", ".join(f'"@{name}"' for name in names)))
    return [f"{problem.text}; {problem.hint}" for problem in graph.faults]


@pytest.mark.parametrize(
    "names",
    [
        ("parse", "translate", "look_up"),
        ("parse", "look_up"),
        ("log_in", "parse", "look_up"),
        ("parse",),
        ("parse", "translate"),
        (),
    ],
)
def test_orders_that_are_fine(shop: Callable[..., Graph], names: tuple[str, ...]) -> None:
    """What is written before it is read is fine, members may be left out, and optional reads may have no writer."""
    assert texts(shop, *names) == []


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (
            ("look_up", "parse"),
            'filters: [look_up] reads words before [parse] writes it; move "@look_up" behind "@parse"',
        ),
        (
            ("parse", "look_up", "translate"),
            "filters: [translate] changes words after [look_up], the last to read it, so the change is lost;"
            ' move "@translate" before "@look_up"',
        ),
        (
            ("look_up",),
            "filters: [look_up] reads words, which nothing in the sequence writes; add a member that writes it",
        ),
        (
            ("parse", "look_up", "log_in"),
            'filters: [look_up] reads user before [log_in] writes it; move "@look_up" behind "@log_in"',
        ),
    ],
)
def test_orders_that_are_not(shop: Callable[..., Graph], names: tuple[str, ...], expected: str) -> None:
    """Reading too early, changing too late and reading what nobody writes are problems with the line to move."""
    assert texts(shop, *names) == [expected]
