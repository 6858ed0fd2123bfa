"""What a run will need, before it starts: memory and time, from the recipe's own modules without memory."""
