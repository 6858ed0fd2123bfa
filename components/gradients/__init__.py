"""From sums over microbatches and ranks to gradients fit to be applied."""
