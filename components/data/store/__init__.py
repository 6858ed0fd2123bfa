"""Token store: documents of token ids on disk, in memory-mapped shards."""
