"""Published schedules, one per file: pure functions from ranks and microbatches to programs."""
