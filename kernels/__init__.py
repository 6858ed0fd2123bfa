"""Kernels, eager and in Triton. They import torch and triton, and nothing of recipes."""
