"""Models: blueprints, and the modules that they become."""
