"""Budgets of the whole tree: numbers that may only fall."""

from house import budgets

BUDGETS = {
    "tokens of the source": 694_060,
    "files that name float8 outside its folder": 8,
    "code lines imported by check": 11_925,
    "code lines imported by run": 18_931,
    "functions on the journey rate": 28,
    "files on the journey rate": 16,
    "functions on the journey batch": 110,
    "files on the journey batch": 36,
    "functions on the journey checkpoint": 97,
    "files on the journey checkpoint": 30,
}
"""
The last measures. Lower a number with the change that makes it smaller, and raise none. The tokens have grown
seven times: by conversations with tools, eight model families, `ask`, `plan --floor`, rollouts ahead of the policy,
kernels and exchanges that overlap, decays by channel, grafts, hyper-connections and their kernels, sparse attention,
environments of `verifiers`, links in plans, and spares for GPUs. No other run imports them.
"""


def test_no_budget_grows() -> None:
    """The source, the imports of a run and the journeys of its values are no larger than their budgets."""
    measured = budgets.measure()
    assert measured.keys() == BUDGETS.keys()
    grown = {name: (value, BUDGETS[name]) for name, value in measured.items() if value > BUDGETS[name]}
    assert not grown, f"measured, and allowed: {grown}"
