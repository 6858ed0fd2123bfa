"""Quantized formats for frozen weights."""
