"""drawloom.graph.suggest"""

import pytest

from drawloom.graph.suggest import did_you_mean, nearest

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
