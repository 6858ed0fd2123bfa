"""Docstrings and names do not get worse: budgets of words that are only ever lowered."""

import ast

import pytest

from support import prose

BUDGETS = {
    "graph": {
        "of": 27.4,
        "that": 2.6,
        "what": 0.1,
        "those": 0.1,
        "which": 2.6,
        "each": 0.9,
        "`each`": 0.0,
        "`found`": 0.5,
        "`place`": 0.0,
        "`held`": 0.0,
        "`of`": 0.0,
        "participle functions": 8.9,
    },
    "kernels": {
        "of": 14.1,
        "that": 4.7,
        "what": 0.0,
        "those": 0.2,
        "which": 3.0,
        "each": 1.2,
        "`each`": 0.0,
        "`found`": 0.0,
        "`place`": 0.0,
        "`held`": 0.0,
        "`of`": 0.0,
        "participle functions": 5.8,
    },
    "components": {
        "of": 18.8,
        "that": 6.3,
        "what": 0.2,
        "those": 0.2,
        "which": 2.9,
        "each": 1.0,
        "`each`": 0.0,
        "`found`": 0.0,
        "`place`": 0.0,
        "`held`": 0.0,
        "`of`": 0.4,
        "participle functions": 6.7,
    },
    "src": {
        "of": 10.5,
        "that": 5.3,
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
        "of": 28.6,
        "that": 7.2,
        "what": 0.3,
        "those": 0.3,
        "which": 2.4,
        "each": 2.8,
        "`each`": 0.0,
        "`found`": 0.3,
        "`place`": 0.2,
        "`held`": 0.2,
        "`of`": 0.0,
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
