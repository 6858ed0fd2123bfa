"""Values of a training step: trees of tensors, sharding specs, and the state with its views."""
