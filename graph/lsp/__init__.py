"""The language server for recipes: the knowledge of `check`, `explain` and `list` while the user types."""
