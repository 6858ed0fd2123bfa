"""Rewards: scores of sampled completions."""
