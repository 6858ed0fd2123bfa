"""The registry: components available to recipes, found by file or entry point."""
