"""The run: its steps, its phases, and what stands around them."""
