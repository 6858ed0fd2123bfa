"""Processes, process groups, the device mesh, and random numbers equal on any rank."""
