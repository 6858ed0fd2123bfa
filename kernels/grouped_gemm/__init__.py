"""Grouped GEMM and expert biases: rows sorted by expert."""
