"""The programs of every schedule, word for word."""

import pytest

from support.golden import GOLDEN
from support.schedules import NAMES, golden


@pytest.mark.parametrize("name", NAMES)
def test_programs_are_those_of_the_golden_file(name: str) -> None:
    """Each rank does what is recorded, in that order, messages included."""
    assert golden(name) == (GOLDEN / "schedules" / f"{name}.txt").read_text("utf-8")


def test_every_golden_file_is_of_a_schedule() -> None:
    """No file is left of a schedule that is gone."""
    assert sorted(path.stem for path in (GOLDEN / "schedules").glob("*.txt")) == sorted(NAMES)
