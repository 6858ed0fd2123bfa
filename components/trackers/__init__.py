"""Trackers: stores for a run's metrics."""
