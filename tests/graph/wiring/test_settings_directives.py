"""Directives that are written inside of a table."""

from collections.abc import Callable

import pytest

from drawloom.graph.wiring.graph import Graph


@pytest.mark.parametrize("directive", ["unset", "extends"])
def test_a_directive_in_a_table_gets_a_hint(shop: Callable[..., Graph], directive: str) -> None:
    """It belongs at the top of the file, as TOML gives what follows a table's name to the table."""
    (problem,) = shop(f'[page]\n{directive} = ["store"]').errors
    assert problem.node == "page" and "at the top of the file" in problem.hint
