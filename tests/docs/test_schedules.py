"""The schedules page."""

from generate.schedules import PAGE, page


def test_schedules_page_is_up_to_date() -> None:
    """The page equals the output of `python tests/golden`."""
    assert PAGE.read_text("utf-8") == page()
