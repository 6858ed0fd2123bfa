"""The nearest known name."""

import time

import pytest

from drawloom.graph.spelling import find_nearest

KNOWN = ["max_norm", "every", "Keep"]


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("max_nrom", "max_norm"),
        ("max-norm", "max_norm"),
        ("EVERY", "every"),
        ("keep", "Keep"),
        ("zzz", None),
        ("", None),
    ],
)
def test_the_nearest_name_is_found_whatever_its_case(name: str, nearest: str | None) -> None:
    """Typing errors are near a name, and another word is not."""
    assert find_nearest(name, KNOWN) == nearest


def test_short_names_with_another_letter_are_not_near() -> None:
    """Short names are near if letters are swapped or missing, not if a letter is replaced."""
    assert [find_nearest(name, ["cpu", "cuda", "auto"]) for name in ("gpu", "cup", "cp", "CPU")] == [
        None,
        "cpu",
        "cpu",
        "cpu",
    ]


def test_the_same_name_in_another_case_is_nearest_of_many() -> None:
    """A name in another case is nearer than a name that lacks a letter and sorts first."""
    assert find_nearest("Node77", ["node7", "node77", *(f"other{number}" for number in range(200))]) == "node77"


@pytest.mark.parametrize("name", ["node7", "nod77", "ndoe77", "node777", "node77", "NODE77"])
def test_one_edit_is_found_among_many(name: str) -> None:
    """A typing error in one letter is recognized among hundreds of names."""
    assert find_nearest(name, [f"other{number}" for number in range(500)] + ["node77"]) == "node77"


def test_suggestions_for_thousands_of_names_are_fast() -> None:
    """A thousand hints among five thousand names take less than a second of processor time."""
    names = [f"node{number}" for number in range(5000)]
    began = time.process_time()
    assert [find_nearest(f"nobody{number}", names) for number in range(1000)] == [None] * 1000
    assert time.process_time() - began < 1
