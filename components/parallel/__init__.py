"""Parallelism: one module per mesh dimension, and shared parts."""
