"""Run report: one HTML file with curves, events, checkpoints, samples and drawings."""
