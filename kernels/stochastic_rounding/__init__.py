"""Stochastic rounding from float32 to bfloat16."""
