"""Output for people and files: explanations, listings, differences, and recipes written out."""
