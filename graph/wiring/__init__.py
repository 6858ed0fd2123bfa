"""From a recipe to a checked graph of nodes with settings and edges."""
