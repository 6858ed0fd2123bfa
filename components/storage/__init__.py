"""Atomic, durable and hashed files and folders, and validating readers for untrusted ones."""
