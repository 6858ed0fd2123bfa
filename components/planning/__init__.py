"""Planning before a run starts: memory and time, estimated with the recipe's modules on the meta device."""
