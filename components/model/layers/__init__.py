"""Layers that models are made of."""
