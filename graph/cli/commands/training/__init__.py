"""Commands that start runs."""
