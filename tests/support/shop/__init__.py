"""A small web shop, to try the graph layer on another domain."""
