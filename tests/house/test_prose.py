"""Docstrings and names do not get worse: budgets of words that are only ever lowered."""

import ast

from support import prose

BUDGETS = {
    "of": 55.9,
    "that": 20.0,
    "what": 5.9,
    "those": 3.5,
    "which": 6.4,
    "each": 10.1,
    "`each`": 10.5,
    "`found`": 10.3,
    "`place`": 5.1,
    "`held`": 2.3,
    "`of`": 0.5,
    "participle functions": 55.1,
}
"""Per 1000 words of docstrings, 1000 bound names, and 1000 functions; lower a budget when a count has fallen."""


def test_words_stay_within_their_budgets() -> None:
    """Pronouns in docstrings and in names, and functions named by participles, are no more frequent than before."""
    found = prose.measure(prose.trees())
    assert found.keys() == BUDGETS.keys()
    assert {name: count for name, count in found.items() if count > BUDGETS[name]} == {}


def test_words_are_counted_in_docstrings_and_bindings() -> None:
    """Each kind of word is counted where it is written, and nowhere else."""
    text = '''
def found(of, other):
    """What is of use."""
    place = each(of)  # of
def is_held(): ...
'''
    counts = prose.measure([ast.parse(text)])
    assert counts == {
        **dict.fromkeys(("that", "those", "which", "each", "`each`", "`found`", "`held`"), 0),
        "of": 250,
        "what": 250,
        "`of`": 1000 / 3,
        "`place`": 1000 / 3,
        "participle functions": 500,
    }
