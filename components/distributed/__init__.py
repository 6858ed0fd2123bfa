"""Processes, groups of them, what they compute on, and randomness that any rank can derive."""
