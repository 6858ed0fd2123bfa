"""Orders of rows within an epoch, and the endless stream of rows over epochs and sources."""
