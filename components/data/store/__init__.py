"""The token store: documents of token ids on disk, in shards that are memory-mapped."""
