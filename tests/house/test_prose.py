"""Docstrings and names do not get worse: budgets of words that are only ever lowered."""

import ast

import pytest

from support import prose

BUDGETS = {
    "graph": {
        "of": 30.0,
        "that": 2.7,
        "what": 0.1,
        "those": 0.1,
        "which": 2.9,
        "each": 0.9,
        "`each`": 0.0,
        "`found`": 0.5,
        "`place`": 0.0,
        "`held`": 0.0,
        "`of`": 0.0,
        "participle functions": 9.5,
    },
    "kernels": {
        "of": 20.6,
        "that": 6.6,
        "what": 0.0,
        "those": 0.2,
        "which": 3.4,
        "each": 2.5,
        "`each`": 0.0,
        "`found`": 0.0,
        "`place`": 0.0,
        "`held`": 0.0,
        "`of`": 0.0,
        "participle functions": 9.0,
    },
    "components": {
        "of": 24.3,
        "that": 8.4,
        "what": 0.2,
        "those": 0.3,
        "which": 3.3,
        "each": 1.6,
        "`each`": 0.1,
        "`found`": 0.4,
        "`place`": 0.0,
        "`held`": 0.0,
        "`of`": 0.5,
        "participle functions": 14.3,
    },
    "src": {
        "of": 10.5,
        "that": 7.0,
        "what": 0.0,
        "those": 0.0,
        "which": 0.0,
        "each": 0.0,
        "`each`": 0.0,
        "`found`": 0.0,
        "`place`": 0.0,
        "`held`": 0.0,
        "`of`": 0.0,
        "participle functions": 0.0,
    },
    "tests": {
        "of": 31.3,
        "that": 13.3,
        "what": 0.8,
        "those": 0.8,
        "which": 2.4,
        "each": 2.9,
        "`each`": 0.8,
        "`found`": 0.3,
        "`place`": 0.4,
        "`held`": 0.2,
        "`of`": 0.1,
        "participle functions": 7.1,
    },
}
"""By room, per 1000 words in docstrings, bound names, and functions. Lower a budget when a count has fallen."""


@pytest.mark.parametrize("room", prose.ROOMS)
def test_words_of_a_room_stay_within_its_budget(room: str) -> None:
    """Pronouns in docstrings and names, and functions named by participles, become no more frequent in any room."""
    counts = prose.measure(prose.trees(room))
    assert counts.keys() == BUDGETS[room].keys()
    assert {name: count for name, count in counts.items() if count > BUDGETS[room][name]} == {}


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
