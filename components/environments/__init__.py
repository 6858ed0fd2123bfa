"""Environments for conversations, and tools for models."""
