"""Recorded editor output while a recipe is typed."""

from support.editing import record
from support.golden import GOLDEN


def test_editing_session_matches_the_golden_file() -> None:
    """Problems, completions, explanations, definitions and edits while a recipe is typed are as recorded."""
    assert record() == (GOLDEN / "editing.txt").read_text("utf-8")
