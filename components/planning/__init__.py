"""Planning of a run before it starts: memory and time, estimated with the recipe's modules on the meta device."""
