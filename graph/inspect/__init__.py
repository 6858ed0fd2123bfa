"""Output for users and files: explanations, listings, differences, and recipes as text."""
