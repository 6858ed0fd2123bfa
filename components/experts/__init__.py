"""Dispatchers, which send tokens to their experts and back."""
