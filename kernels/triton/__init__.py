"""Launches, primitives and TMA for kernels in Triton; only modules named `triton` import triton when imported."""
