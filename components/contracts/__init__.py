"""Contracts of ports: a module per module of ports, and a function per property that implementations must have."""
