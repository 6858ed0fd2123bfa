"""Environments of conversations, and tools that models call in them."""
