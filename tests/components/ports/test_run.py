"""Which steps a cadence selects."""

import pytest

from drawloom.components.ports.run import Cadence, Step, check_cadence, due


@pytest.mark.parametrize(
    ("cadence", "steps"),
    [(1, [1, 2, 3, 4, 5, 6, 7]), (3, [3, 6, 7]), (7, [7]), (100, [7]), ("last", [7]), ("never", [])],
)
def test_steps_of_a_cadence(cadence: Cadence, steps: list[int]) -> None:
    """A number selects its multiples and the last step, `last` only the last step, `never` none."""
    assert [index for index in range(1, 8) if due(cadence, Step(index, 7))] == steps


def test_a_cadence_of_no_steps_is_refused() -> None:
    """Zero and negative numbers are refused; one is accepted."""
    assert [cadence for cadence in (-1, 0, 1, "last", "never") if check_cadence(cadence)] == [-1, 0]
