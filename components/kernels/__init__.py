"""Choice of an implementation for every operation of a model."""
