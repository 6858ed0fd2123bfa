"""From a recipe to a graph of nodes and edges, with every problem on the way."""
