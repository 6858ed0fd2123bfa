"""The page of schedules."""

from generate.schedules import PAGE, page


def test_the_page_shows_the_schedules_as_they_are() -> None:
    """Table, sources and pictures are those that `python tests/golden` writes."""
    assert PAGE.read_text("utf-8") == page()
