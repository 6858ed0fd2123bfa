"""Draws from logits."""
