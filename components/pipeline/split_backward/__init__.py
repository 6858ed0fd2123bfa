"""The split backward pass: gradients of inputs, then those of weights."""
