"""Copies of a state that stay as they are while training goes on, and while they are written."""
