"""The components that a recipe can name."""
