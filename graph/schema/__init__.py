"""JSON Schema for recipes, so that editors complete names and keys and show what they mean."""
