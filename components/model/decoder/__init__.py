"""A decoder of transformer layers, from which all families are built: sizes, layers, and Hugging Face's form."""
