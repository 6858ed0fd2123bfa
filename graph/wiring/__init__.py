"""Builds the graph of a recipe: nodes, settings and edges, with every problem found."""
