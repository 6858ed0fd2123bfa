"""Atomic, durable and hashed files and folders, and readers that validate untrusted ones."""
