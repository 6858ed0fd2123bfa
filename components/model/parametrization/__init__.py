"""Parametrizations: initial values and learning rates that scale with a model's size."""
