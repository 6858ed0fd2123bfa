"""Stages of a model on this rank: built, parallelized and materialized."""
