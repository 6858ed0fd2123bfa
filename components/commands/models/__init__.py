"""Commands with a run's weights."""
