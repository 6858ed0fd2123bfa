"""Models of the library transformers, trained as stages of drawloom."""
