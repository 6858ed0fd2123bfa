"""Kernels in Triton; no other module of kernels/ imports triton when it is imported."""
