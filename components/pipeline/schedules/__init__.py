"""One published schedule a file: pure functions from ranks and microbatches to programs."""
