"""Docstrings and names do not get worse: budgets of words that are only ever lowered."""

import ast

import pytest

from support import prose

BUDGETS = {
    "graph": {
        "of": 30.0,
        "that": 9.0,
        "what": 0.5,
        "those": 0.5,
        "which": 3.0,
        "each": 3.5,
        "`each`": 0.5,
        "`found`": 0.5,
        "`place`": 0.5,
        "`held`": 0.5,
        "`of`": 0.5,
        "participle functions": 12.0,
    },
    "kernels": {
        "of": 46.8,
        "that": 11.8,
        "what": 0.4,
        "those": 0.4,
        "which": 5.8,
        "each": 10.4,
        "`each`": 0.0,
        "`found`": 0.0,
        "`place`": 2.9,
        "`held`": 0.0,
        "`of`": 0.3,
        "participle functions": 15.6,
    },
    "components": {
        "of": 58.3,
        "that": 19.7,
        "what": 6.4,
        "those": 3.9,
        "which": 6.7,
        "each": 10.5,
        "`each`": 13.6,
        "`found`": 10.1,
        "`place`": 5.6,
        "`held`": 3.1,
        "`of`": 0.5,
        "participle functions": 61.0,
    },
    "src": {
        "of": 23.1,
        "that": 23.1,
        "what": 0.0,
        "those": 0.0,
        "which": 3.3,
        "each": 0.0,
        "`each`": 0.0,
        "`found`": 0.0,
        "`place`": 0.0,
        "`held`": 0.0,
        "`of`": 0.0,
        "participle functions": 0.0,
    },
    "tests": {
        "of": 46.8,
        "that": 21.1,
        "what": 8.8,
        "those": 3.6,
        "which": 4.8,
        "each": 9.2,
        "`each`": 11.1,
        "`found`": 19.1,
        "`place`": 9.7,
        "`held`": 2.4,
        "`of`": 0.3,
        "participle functions": 60.9,
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
