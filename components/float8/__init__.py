"""Training with matrix products in float8."""
