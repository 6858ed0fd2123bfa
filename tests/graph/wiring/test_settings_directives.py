"""Directives inside of a table."""

from collections.abc import Callable

import pytest

from drawloom.graph.wiring.graph import Graph


@pytest.mark.parametrize("directive", ["unset", "extends"])
def test_a_directive_in_a_table_gets_a_hint(shop: Callable[..., Graph], directive: str) -> None:
    """A directive in a table gets the hint to move it to the top of the file."""
    (problem,) = shop(f'[page]\n{directive} = ["store"]').errors
    assert problem.node == "page" and "at the top of the file" in problem.hint
