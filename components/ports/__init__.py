"""What components promise one another: Protocols and plain data, nothing that does work."""
