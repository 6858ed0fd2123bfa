"""Scales and sums of gradients."""
