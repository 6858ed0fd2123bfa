"""What people ask of a recipe: explanations, listings, differences."""
