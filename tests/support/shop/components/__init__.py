"""Its components."""
