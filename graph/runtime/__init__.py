"""The container: build, open and close the objects of a graph."""
