"""The objects of a graph: built, opened and closed by the container."""
