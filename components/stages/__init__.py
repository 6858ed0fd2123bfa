"""A model's stages on this rank: built, parallelized and materialized."""
