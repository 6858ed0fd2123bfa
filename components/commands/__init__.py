"""Command-line commands for training runs, imported when called."""
