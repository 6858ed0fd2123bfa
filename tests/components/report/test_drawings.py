"""The picture of a schedule in a report."""

from drawloom.components.pipeline.schedules.one_f_one_b import OneFOneB
from drawloom.components.report.drawings import draw_schedule_svg


def test_only_useful_schedules_are_drawn() -> None:
    """A single rank has no schedule, and a picture too large for a page is left out."""
    assert "one_f_one_b: 2 ranks" in draw_schedule_svg("pipeline.schedules.one_f_one_b", OneFOneB(), 2, 4)
    assert draw_schedule_svg("one_f_one_b", OneFOneB(), 1, 4) == ""
    assert draw_schedule_svg("one_f_one_b", OneFOneB(), 64, 1024) == ""
    assert len(draw_schedule_svg("one_f_one_b", OneFOneB(), 8, 180)) < 1_000_000
