"""Listeners of a run's events, without influence on training: logging, progress, profiler, memory and timeouts."""
