"""From a graph to living objects: built, opened, closed."""
