"""Gradients: averaging over microbatches and ranks, their norm, clipping."""
