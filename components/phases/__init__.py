"""Phases of a training step: forward and backward, evaluation, garbage collection, reports."""
