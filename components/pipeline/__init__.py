"""Schedules as programs, a rank's stages, and the executor that runs programs."""
