"""Schedules as programs, the stages that a rank owns, and the executor that carries programs out."""
