"""Tensors and configurations that ranks share through memory or a folder."""
