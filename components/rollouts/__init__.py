"""Sampling of completions for reinforcement learning."""
