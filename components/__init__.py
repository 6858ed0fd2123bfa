"""Everything that a recipe can name: one file, one component; siblings never import one another."""
