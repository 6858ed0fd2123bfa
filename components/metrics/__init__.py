"""Metrics: numbers about every step, for the trackers."""
