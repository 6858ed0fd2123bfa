"""Which implementation of each operation a model computes with."""
