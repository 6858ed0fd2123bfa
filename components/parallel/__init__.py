"""Parallelism: one module for each mesh dimension, and what they share."""
