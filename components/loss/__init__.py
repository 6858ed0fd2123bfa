"""What is learned."""
