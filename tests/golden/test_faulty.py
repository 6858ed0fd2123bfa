"""Recorded messages for faulty recipes."""

from pathlib import Path

import pytest

from support.golden import read_faulty, run_check, write_faulty


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with all faulty recipes."""
    return write_faulty(tmp_path_factory.mktemp("faulty"))


@pytest.mark.parametrize("name", read_faulty())
def test_faulty_recipe_prints_the_recorded_problems(folder: Path, name: str) -> None:
    """`check` prints exactly the recorded problems with their positions, and no traceback."""
    text = run_check(folder / f"{name}.toml")
    assert "Traceback" not in text
    assert text == read_faulty()[name].output


def test_there_are_at_least_120_faulty_recipes() -> None:
    """At least 120 faulty recipes exist; `tests/graph/test_problems.py` checks that they cover every code."""
    assert len(read_faulty()) >= 120
