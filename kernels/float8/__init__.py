"""Products and casts in float8, in plain torch and, in modules named `triton_...`, in Triton."""
