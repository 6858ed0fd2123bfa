"""Attention to the keys chosen by an indexer."""
