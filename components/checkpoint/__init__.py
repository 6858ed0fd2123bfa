"""Checkpoints: atomic, verified when read, and without pickle."""
