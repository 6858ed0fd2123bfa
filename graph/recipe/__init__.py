"""Recipes: files read as layers, merged over the recipes they extend, and resolved."""
