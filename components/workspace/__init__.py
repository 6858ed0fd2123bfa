"""Tensors and configurations that ranks exchange through memory or a folder."""
