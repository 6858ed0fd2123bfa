"""Losses for language models."""
