"""The training run: the loop, the run folder, batch sizes, seeds and signals."""
