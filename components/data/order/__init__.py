"""Row orders within an epoch, and the endless row stream over epochs and sources."""
