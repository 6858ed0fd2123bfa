"""Metrics: numbers about each step, for the trackers."""
