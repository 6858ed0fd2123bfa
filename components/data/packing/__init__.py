"""Packing: an index from rows to document parts."""
