"""The progress of tokenizing."""

from drawloom.components.data.store.tokenizing import Progress, format_duration


def test_progress_is_printed_at_intervals() -> None:
    """Bytes, share, rate and remaining time are printed at most once an interval; no part exceeds its size."""
    said: list[str] = []
    now = [0.0]
    progress = Progress({0: 4_000_000, 1: 4_000_000}, 2_000_000, said.append, 3, lambda: now[0])
    progress.add_batch(0, 1_000_000, 500_000)
    assert said == []
    now[0] = 4.0
    progress.add_batch(0, 9_000_000, 500_000)
    progress.finish_part(1)
    progress.report_if_due()
    assert said == ["tokenized 6.0 MB of 10.0 MB (60 %), 0.25 M tokens/s, 4 s left"]


def test_times_are_readable() -> None:
    """The unit suits the duration."""
    assert [format_duration(59), format_duration(100), format_duration(600), format_duration(9000)] == [
        "59 s",
        "2 min",
        "10 min",
        "2 h 30 min",
    ]
