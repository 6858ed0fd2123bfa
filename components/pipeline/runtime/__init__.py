"""Programs run on ranks: stages, messages, microbatches."""
