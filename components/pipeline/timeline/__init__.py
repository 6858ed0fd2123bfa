"""Simulated programs as people look at them."""
