"""Kernels in plain torch and in Triton, which import torch and triton, and nothing else of drawloom."""
