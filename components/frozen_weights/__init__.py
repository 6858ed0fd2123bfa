"""Frozen weights in quantized formats, and in host memory."""
