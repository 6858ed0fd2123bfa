"""Trackers, which store a run's metrics."""
