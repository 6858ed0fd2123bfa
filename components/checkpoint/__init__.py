"""Saved state: whole or absent, verified when it is read, and without pickle."""
