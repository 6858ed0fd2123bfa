"""Learning rate schedules."""
