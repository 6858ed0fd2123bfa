"""Training step phases: forward and backward, evaluation, garbage collection, reports."""
