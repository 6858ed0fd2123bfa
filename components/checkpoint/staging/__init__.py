"""Staging: copies of the state that are written while training continues."""
