"""Staging: state copies, written while training continues."""
