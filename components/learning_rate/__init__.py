"""Multiples of the base learning rate, by step."""
