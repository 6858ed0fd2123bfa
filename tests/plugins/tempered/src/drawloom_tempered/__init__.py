"""A loss with a trained temperature for drawloom."""
