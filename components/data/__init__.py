"""Text, tokens, packed rows, and the order in which a run sees them."""
