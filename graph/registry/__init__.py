"""The registry: the components that a recipe can name, found by file or entry point."""
