"""Recurrences whose states decay and add, as in Mamba-2."""
