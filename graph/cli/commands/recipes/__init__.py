"""Commands for writing and reading recipes."""
