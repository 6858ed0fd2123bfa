"""Some stores."""
