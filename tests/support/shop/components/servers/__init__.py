"""Some servers."""
