"""Choice of an implementation for each operation of a model."""
