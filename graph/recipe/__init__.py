"""Recipes: files read as layers, merged over what they extend, and resolved."""
