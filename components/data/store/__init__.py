"""Token store: token documents on disk, in memory-mapped shards."""
