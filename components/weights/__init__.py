"""Mappers between state dicts, and weights loaded and saved through them. A library without components."""
