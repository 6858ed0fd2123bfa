"""Weave LLM training runs from components, by recipe."""
