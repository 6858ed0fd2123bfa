"""Ports between components: Protocols and plain data, without behavior."""
