"""Checkpoints that are whole or absent, verified when they are read, and free of pickle."""
