"""How long things took."""

import pytest

from drawloom.graph.runtime.timings import Timing, report, timed


def test_a_report_names_the_slow_and_adds_up_the_rest() -> None:
    """Nodes by the time they took in all, those below a millisecond together, and the sum."""
    spans = [
        Timing("model", "build", 0.0, 0.25),
        Timing("data", "open", 0.3, 1.5),
        Timing("data", "close", 2.0, 0.5),
        Timing("job", "build", 0.0, 0.0004),
        Timing("mesh", "open", 0.0, 0.0003),
    ]
    assert report(spans).splitlines() == [
        "ms           build      open     close",
        "[data]         0.0    1500.0     500.0",
        "[model]      250.0       0.0       0.0",
        "2 others       0.4       0.3       0.0",
        "all          250.4    1500.3     500.0",
    ]


def test_what_fails_is_timed_too() -> None:
    """The time until a failure counts."""
    spans: list[Timing] = []
    with pytest.raises(ValueError, match="no"), timed(spans, "x", "open"):
        raise ValueError("no")
    assert [(span.node, span.moment) for span in spans] == [("x", "open")] and spans[0].seconds >= 0
