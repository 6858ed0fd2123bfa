"""The backward pass in two halves: gradients of inputs, then those of weights."""
