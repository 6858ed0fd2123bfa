"""Processes, process groups, the device mesh, and random numbers that any rank can derive."""
