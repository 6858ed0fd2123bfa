"""The language server of recipes: what `check`, `explain` and `list` know, while a recipe is typed."""
