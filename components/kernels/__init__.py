"""Choice of an implementation for every model operation."""
