"""What an editor shows while a recipe is typed, word for word."""

from support.editing import record
from support.golden import GOLDEN


def test_an_editing_session_shows_what_is_recorded() -> None:
    """Problems, completions, explanations, definitions and edits of a session in which each letter is a change."""
    assert record() == (GOLDEN / "editing.txt").read_text("utf-8")
