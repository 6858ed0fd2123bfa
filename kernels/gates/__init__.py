"""Gates of feed-forward networks."""
