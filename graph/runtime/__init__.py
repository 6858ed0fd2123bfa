"""The container, which builds, opens and closes the objects of a graph."""
