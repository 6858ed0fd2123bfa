"""What a step knows, in two views: the whole batch, and one microbatch."""
