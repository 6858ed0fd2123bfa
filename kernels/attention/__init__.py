"""Causal attention within documents, by several implementations."""
