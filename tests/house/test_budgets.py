"""Budgets of the whole tree: numbers that may only fall."""

from house import budgets

BUDGETS = {
    "tokens of the source": 627_049,
    "files that name float8 outside its folder": 8,
    "code lines imported by check": 18_493,
    "code lines imported by run": 23_324,
    "functions on the journey rate": 42,
    "files on the journey rate": 21,
    "functions on the journey batch": 163,
    "files on the journey batch": 49,
    "functions on the journey checkpoint": 149,
    "files on the journey checkpoint": 44,
}
"""The last measures. Lower a number with the change that makes it smaller, and raise none."""


def test_no_budget_grows() -> None:
    """The source, the imports of a run and the journeys of its values are no larger than their budgets."""
    measured = budgets.measure()
    assert measured.keys() == BUDGETS.keys()
    grown = {name: (value, BUDGETS[name]) for name, value in measured.items() if value > BUDGETS[name]}
    assert not grown, f"measured, and allowed: {grown}"
