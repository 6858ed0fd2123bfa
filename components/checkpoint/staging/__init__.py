"""Staging: copies of a state that are written while training continues."""
