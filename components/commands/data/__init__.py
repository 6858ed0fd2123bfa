"""Commands for data."""
