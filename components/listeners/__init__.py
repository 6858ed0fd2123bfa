"""Listeners of a run's events: logging, progress, profiler and timeouts, without influence on training."""
