"""Mappers between state dicts, and weights that are loaded and saved through them. A library without components."""
