"""Commands for runs."""
