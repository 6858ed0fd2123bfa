"""What every tracker does."""

from drawloom.components.ports.run import Tracker


def it_takes_all_that_is_measured(tracker: Tracker) -> None:
    """Numbers, booleans and nothing are taken, and names with dots and slashes."""
    tracker.track(1, {"loss": 1.5, "skipped": False, "validation_loss": None, "memory/peak.bytes": 3})
    tracker.track(2, {})


def it_goes_back(tracker: Tracker) -> None:
    """What was written after a step can be forgotten and written again, also when nothing was written after it."""
    for step in (1, 2, 3):
        tracker.track(step, {"loss": float(step)})
    tracker.rewind(1)
    tracker.rewind(1)
    for step in (2, 3):
        tracker.track(step, {"loss": float(-step)})
    tracker.rewind(0)
    tracker.track(1, {"loss": 0.0})
