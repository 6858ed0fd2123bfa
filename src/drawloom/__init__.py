"""Train language models from components that a recipe combines."""
