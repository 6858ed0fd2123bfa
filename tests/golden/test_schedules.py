"""Recorded programs of every schedule."""

import pytest

from support.golden import GOLDEN
from support.schedules import NAMES, golden


@pytest.mark.parametrize("name", NAMES)
def test_programs_match_the_golden_file(name: str) -> None:
    """Every rank's actions and messages are as recorded, in order."""
    assert golden(name) == (GOLDEN / "schedules" / f"{name}.txt").read_text("utf-8")


def test_every_golden_file_belongs_to_a_schedule() -> None:
    """No golden file is left over from a removed schedule."""
    assert sorted(path.stem for path in (GOLDEN / "schedules").glob("*.txt")) == sorted(NAMES)
