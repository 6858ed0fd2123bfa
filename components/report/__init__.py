"""The report of runs: one HTML file of curves, events, checkpoints, samples and drawings."""
