"""Qwen3 (Qwen team 2025, arXiv 2505.09388), the dense models of the family and those with experts."""
