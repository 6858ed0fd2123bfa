"""Recipes: read, laid over what they extend, and written out resolved."""
