"""Phases of a training step that belong to no other subject."""
