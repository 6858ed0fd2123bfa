"""The state of a step in two views: the whole batch, and one microbatch."""
