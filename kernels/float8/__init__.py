"""Products and casts in float8, in plain torch and in Triton."""
