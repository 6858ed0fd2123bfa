"""Listeners of a run's events: they watch, and change nothing that is learned."""
