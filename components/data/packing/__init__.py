"""Packing: which parts of which documents make each row, by index alone."""
