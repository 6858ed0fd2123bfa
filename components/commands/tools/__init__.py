"""Servers and schemas for other programs."""
