"""The commands for any graph, one per file."""
