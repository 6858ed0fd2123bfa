"""Qwen3 (Qwen team 2025, arXiv 2505.09388), the family's dense and mixture-of-experts models."""
