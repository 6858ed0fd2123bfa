"""Programs: built row by row or by list scheduling, checked, lowered, written down."""
