"""drawloom.graph.toml.suggest"""

import time

import pytest

from drawloom.graph.toml.suggest import did_you_mean, nearest

KNOWN = ["max_norm", "every", "Keep"]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("max_nrom", "max_norm"),
        ("max-norm", "max_norm"),
        ("EVERY", "every"),
        ("keep", "Keep"),
        ("zzz", None),
        ("", None),
    ],
)
def test_the_nearest_name_is_found_whatever_its_case(name: str, found: str | None) -> None:
    """Slips of the fingers are near; another word is not."""
    assert nearest(name, KNOWN) == found


def test_the_hint_names_the_nearest_or_a_few_choices() -> None:
    """A long list of choices helps nobody."""
    assert did_you_mean("kep", KNOWN) == "did you mean 'Keep'?"
    assert did_you_mean("zzz", KNOWN) == "there is Keep, every, max_norm"
    assert did_you_mean("zzz", map(str, range(13))) == ""
    assert did_you_mean("zzz", []) == ""


@pytest.mark.parametrize("name", ["node7", "nod77", "ndoe77", "node777", "node77", "NODE77"])
def test_one_edit_is_found_among_many(name: str) -> None:
    """Among hundreds of names a slip of one letter is still seen."""
    assert nearest(name, [f"other{number}" for number in range(500)] + ["node77"]) == "node77"


def test_thousands_of_faults_among_thousands_of_names_take_no_minutes() -> None:
    """The cost of a hint does not grow with the number of names beyond all bounds."""
    names = [f"node{number}" for number in range(5000)]
    began = time.process_time()
    assert [nearest(f"nobody{number}", names) for number in range(1000)] == [None] * 1000
    assert time.process_time() - began < 1
